"""What travels between server and sites.

To a site: the tensors of the method's broadcast and one config record. Back: the tensors of the method's upload and one
config record. Trained parameters are in the array record `parameters`, one flat array for each of the method's names
(`theta`; FedMatch: `sigma`, `psi`, `helper.0`, ...), batch-norm statistics in the array record `statistics`: they
are no weights, and privacy mods treat them differently. Arrays keep their type, so a round trip is exact.

What leaves a site, and beside random bytes nothing else: its name and number, how many sites its description has and
the description's fingerprint, its version of feddure, and its numbers of labelled, unlabelled and unreadable images;
each round its name and number, the round's, the method's upload, the seconds that the work took, whether what it
remembered is lost, and means over all images and steps of the round (losses, the weight of pseudo labels, what else a
method records), over its own test images and those that it set aside for validation (accuracy, of tests the loss, and
how many they are); or, in place of all this, its name and the text of a problem, which names no folder and no file of
the site. Nothing is told of a single image or step, or of a single class, but for the class counts in ProxyFL's
upload.

Each message has random bytes, so that nobody can foretell it. The SuperLink keeps the parts of messages under their
hashes, and believes whoever names a part first what that part is made of: a site that knew a message before it is sent
could say something wrong of it, and the SuperLink would then refuse the message.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, fields
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk

from feddure.errors import RunError
from feddure.flower.app.limits import FLOWERS_PART
from feddure.flower.app.sanitize import disclosed, one_line
from feddure.methods.base import Client, State
from feddure.simulation.program import Program
from feddure.simulation.server import Assignment

PARAMETERS, STATISTICS, TASK, ANSWER = "parameters", "statistics", "task", "answer"
QUERY, TRAIN = "query", "train"
_MOST_ARRAYS = 1000
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Task:
    """What a site is told, beside the tensors."""

    assignment: Assignment
    experiment: str  # the complete configuration, as YAML
    run_name: str  # of the run, for the site's memory; the same after a resume
    remembered_round: int  # the last round whose update of this site the server used; 0 for none
    checkpointed_round: int  # the same as of the server's last checkpoint, to which it may go back
    evaluate: bool = False  # also test the received model on the site's own test and validation images
    clip_norm: float = 0.0
    dp_noise: float = 0.0
    audit: str = ""  # hash of the last entry in the server's audit log, for the site's own
    notice: str = ""  # what else the person at the site should know
    left_out: str = ""  # the last round in which the server could not use this site's answer, and why

    def pack(self) -> ConfigRecord:
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "assignment"}
        return pack(asdict(self.assignment) | own)

    @staticmethod
    def unpack(record: ConfigRecord) -> "Task":
        try:
            assignment = Assignment(**{field.name: _checked(record, field) for field in fields(Assignment)})
            others = {field.name: _checked(record, field) for field in fields(Task) if field.name != "assignment"}
            return Task(assignment, **others)
        except KeyError as missing:
            raise disclosed(
                RunError(
                    f"the server's message has no {missing}: install the same version of feddure at server and sites"
                )
            ) from None


def _checked(record: ConfigRecord, field: Field[Any]) -> Any:
    """A value of the server's, which may send anything under any name."""
    value, expected = record[field.name], cast(type, field.type)
    if type(value) is not expected and (expected, type(value)) != (float, int):
        raise disclosed(
            RunError(f"the server sent '{field.name}' as {type(value).__name__}, expected {expected.__name__}")
        )
    return value


def pack_state(state: Mapping[str, torch.Tensor], random: bytes = b"") -> RecordDict:
    """Tensors as array records; equal ones that are sent with the same `random` bytes the SuperLink keeps once."""
    random = random or random_bytes()
    groups: dict[str, dict[str, torch.Tensor]] = {PARAMETERS: {}}
    for name, tensor in state.items():
        groups.setdefault(STATISTICS if name == STATISTICS else PARAMETERS, {})[name] = tensor
    return RecordDict({group: to_arrays(tensors, random) for group, tensors in groups.items()})


def unpack_state(content: RecordDict, device: torch.device) -> State:
    """Array records as tensors on a device."""
    found: State = {}
    for group in (PARAMETERS, STATISTICS):
        found |= to_tensors(content.array_records.get(group, {}))
    return {name: tensor.to(device) for name, tensor in found.items()}


def to_arrays(state: Mapping[str, torch.Tensor], random: bytes) -> ArrayRecord:
    """Tensors as one array record."""
    record = ArrayRecord()  # made of a dictionary it would be one of other arrays
    for name, tensor in state.items():
        record[name] = _array(tensor.detach().cpu().contiguous().numpy(), random)
    return record


def _array(values: np.ndarray, random: bytes) -> Array:
    """An array of whose parts nobody can guess one: blanks before NumPy's header are random, and where parts end."""
    array = Array(values)
    header = len(array.data) - values.nbytes - 10
    blanks = bytes(b" \t"[bit] for bit in np.unpackbits(np.frombuffer(random, dtype=np.uint8)))
    array.data = array.data[:8] + (len(blanks) + header).to_bytes(2, "little") + blanks + array.data[10:]
    rng, data, parts = np.random.default_rng(list(random)), memoryview(array.data), []
    while data:
        size = FLOWERS_PART - int(rng.integers(FLOWERS_PART // 2))
        parts.append(ArrayChunk(data[:size]))
        data = data[size:]
    array.__dict__["_chunks"] = [(part.object_id, part) for part in parts]  # where Flower keeps them
    return array


def random_bytes() -> bytes:
    """Of a message."""
    return secrets.token_bytes(16)


def to_tensors(record: Mapping[str, Array]) -> State:
    """An array record as tensors."""
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in record.items()}


def count_problem(content: RecordDict) -> str:
    """Whether a message holds more arrays than any method sends: one name costs little, and may repeat an array."""
    records, arrays = len(content), sum(map(len, content.array_records.values()))
    return f"sent {arrays:,} arrays in {records:,} records" if max(records, arrays) > _MOST_ARRAYS else ""


def array_bytes(content: RecordDict) -> int:
    """Bytes of all arrays, as they are sent."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def upload_shapes(program: Program) -> Shapes:
    """The names, shapes and types of what a client of this program sends."""
    client = Client(program.network, program.experiment, program.proximal, program.classes)
    program.method.allocate(client)
    return {name: (tuple(value.shape), value.dtype) for name, value in program.method.upload(client).items()}


def shape_bytes(shapes: Shapes) -> int:
    """Bytes of arrays of these shapes and types."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def find_problem(upload: State, expected: Shapes) -> str:
    """Why an upload cannot be used, or nothing."""
    if upload.keys() != expected.keys():
        return f"sent arrays {one_line(_names(upload))}, expected {_names(expected)}"
    for name, (shape, dtype) in expected.items():
        found = upload[name]
        if tuple(found.shape) != shape:
            return f"sent '{name}' with shape {list(found.shape)}, expected {list(shape)}"
        if found.dtype != dtype:
            return f"sent '{name}' as {_type(found.dtype)}, expected {_type(dtype)}"
    return ""


def pack(values: Mapping[str, Any]) -> ConfigRecord:
    """A flat record that nobody can guess; what is None is left out."""
    found = {name: value for name, value in values.items() if value is not None}
    return ConfigRecord(found | {"random": random_bytes()})


def _names(mapping: Mapping[str, object]) -> str:
    return ", ".join(sorted(mapping)) or "none"


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
