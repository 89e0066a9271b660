"""The paper's numbers, as printed."""

from feddure import methods
from feddure.studies.paper import plan as reproduce
from feddure.studies.paper.numbers import method_name, printed


def test_tables_are_complete_and_belong_to_methods_that_exist():
    first, second = printed("table1"), printed("table2")
    assert (len(first), len(second)) == (81, 21)
    assert {method for *_, method in first} == set(reproduce.TABLE1) - {"fedavg-matched"}
    assert {method for *_, method in second} == set(reproduce.TABLE2)
    assert {method for *_, method in (first | second)} <= set(methods.METHODS)


def test_numbers_are_those_of_the_text():
    table = printed("table1")
    for dataset, gain in (("cifar10", 12.17), ("cinic10", 11.16)):
        ours, theirs = (table[dataset, "dir-dir", method] for method in ("feddure", "fedmatch"))
        assert round(ours - theirs, 2) == gain
    assert printed("table2")["cifar10", "iid-iid", "fedavg-fixmatch"] == 47.60


def test_figure_1_has_the_numbers_of_table_1_and_charts_have_none():
    assert len(printed("figure1")) == 9
    assert printed("gamma") == {}


def test_the_ablation_has_a_word_of_its_own_for_a_method():
    assert method_name("fedavg-fixmatch", "table2") == "Baseline"
    assert method_name("fedavg-fixmatch", "table1") == "FedAvg-FixMatch"
