"""Messages of sites that would become far larger than what was sent, or that Flower cannot put together."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_body,
    get_object_id,
)
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid

from feddure.flower.app import inflation
from feddure.flower.app.messages import count_problem


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    monkeypatch.setattr(http_grid, "inflate_object_from_contents", http_grid.inflate_object_from_contents)
    monkeypatch.setattr(Array, "inflate", Array.inflate)
    monkeypatch.setattr(http_grid, "pull_objects", http_grid.pull_objects)
    monkeypatch.setattr(inflation, "_most", inflation._most)
    inflation.guard(60.0)
    inflation.allow(100_000)


def contents(arrays):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(RecordDict({"parameters": ArrayRecord(arrays)}), dst_node_id=1, message_type="train")
    return message.object_id, {number: each.deflate() for number, each in get_all_nested_objects(message).items()}


def repeat_parts(head, objects, times):
    """The same message, whose array names its only part many times."""
    array = next(number for number, content in objects.items() if content.startswith(b"Array "))
    about = json.loads(get_object_body(objects[array], Array))
    about["arraychunk_ids"] = [0] * times
    swapped = Array(np.zeros(1))
    (part,) = [number for number, content in objects.items() if content.startswith(b"ArrayChunk ")]
    type(swapped).children, kept = property(lambda self: {part: None}), type(swapped).children
    try:
        bomb = add_header_to_object_body(json.dumps(about).encode(), swapped)
    finally:
        type(swapped).children = kept
    renamed = {array: get_object_id(bomb)}
    made = {renamed[array]: bomb, part: objects[part]}
    for kind in (b"ArrayRecord ", b"RecordDict ", b"Message "):
        old = next(number for number, content in objects.items() if content.startswith(kind))
        content = objects[old]
        for before, after in renamed.items():
            content = content.replace(before.encode(), after.encode())
        renamed[old] = get_object_id(content)
        made[renamed[old]] = content
    return renamed[head], made


def test_a_message_that_fits_is_put_together():
    head, objects = contents({"theta": Array(np.arange(10_000, dtype=np.float32))})
    message = http_grid.inflate_object_from_contents(head, objects)
    np.testing.assert_array_equal(
        message.content.array_records["parameters"]["theta"].numpy(), np.arange(10_000, dtype=np.float32)
    )


@pytest.mark.parametrize("times", [3, 1_000_000])
def test_one_part_named_many_times_is_refused_before_it_takes_memory(times):
    head, objects = repeat_parts(*contents({"theta": Array(np.arange(10_000, dtype=np.float32))}), times)
    with pytest.raises(ValueError, match="more than 100,000 bytes"):
        http_grid.inflate_object_from_contents(head, objects)


def test_several_arrays_share_the_bound():
    head, objects = contents({str(number): Array(np.full(10_000, number, dtype=np.float32)) for number in range(3)})
    with pytest.raises(ValueError, match="more than 100,000 bytes"):
        http_grid.inflate_object_from_contents(head, objects)


def test_an_array_under_a_thousand_names_is_not_looked_at():
    array = Array(np.zeros(3, dtype=np.float32))
    named = ArrayRecord({str(number): array for number in range(1001)})
    assert "1,001 arrays" in count_problem(RecordDict({"parameters": named}))
    assert count_problem(RecordDict({"parameters": ArrayRecord({"theta": array})})) == ""
