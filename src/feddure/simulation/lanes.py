"""Lanes: places where clients train side by side.

A lane holds the static tensors of one client in training. On CUDA it has its own stream and, for each shape of
batch, its own captured graph of one local step. The tasks of a round are dealt out longest first; a lane that has
finished a client writes what it uploads to that client's own slot and takes its next task in place. Nothing waits for
anything else: the main stream goes on where all lanes have finished, and the host is free meanwhile for what does not
depend on their work.

On a CPU a lane is a thread with a network of its own. One core a client wastes less than all cores on each layer of
one client, whose threads wait for each other after every piece: beside other programs they may take tens of times as
long.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from feddure import environment
from feddure.data.batches import Batch
from feddure.errors import FeddureError, FeddureWarning
from feddure.methods.base import Client, State
from feddure.methods.validation import check_memory
from feddure.simulation.program import Program

AUTO_LANES = 20
"""Lanes on a GPU when nobody says: more than five hardly gained anything (results/lanes.json)."""

_TRAINED, _LABELLED = 20_000, 1_300
"""Bytes a pixel of images that a step trains on, and of those that a frozen model labels, with ResNet-9."""

_VECTORS = 12
"""Models, gradients and an optimiser's means of a client, at most."""

_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class Task:
    """One client's local training of one round."""

    program: Program
    client: int
    steps: int
    batches: Batch
    received: Mapping[str, Tensor]
    key: tuple[int, ...]  # seed, round, client: what random decisions of this task depend on
    class_counts: Tensor  # of the client's labelled images
    memory: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a task left: the upload, what the client remembers, and its steps' records, [steps, ...] each."""

    upload: State
    memory: State
    records: dict[str, Tensor]


class Stopped(Exception):
    """Somebody asked to stop between two steps; the round that was under way is lost, nothing else."""


class _ForOneThread(Exception):
    """A step asked for PyTorch's forward mode, whose level is the whole process's."""


class Lane:
    """One place to train; works on one task at a time."""

    def __init__(self, number: int, program: Program, stream: torch.cuda.Stream | None):
        self.number = number
        self.program = program
        self.stream = stream
        alone = stream is not None or number == 0 or not program.network.reentrant
        network = program.network if alone else program.network.for_thread()
        self.client = Client(network, program.experiment, program.proximal, program.classes)
        program.method.allocate(self.client)
        check_memory(program.method, self.client, program.experiment.method)
        self._graphs: dict[tuple[torch.Size, ...], _StepGraph] = {}
        self._compiled: set[tuple[torch.Size, ...]] = set()
        self._tried = False

    def follow(self) -> None:
        """What the main stream was told so far comes first: the lane's own tensors, the task's images and model."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def begin(self, task: Task) -> None:
        """Take a task: receive the global model in place and reset the optimiser."""
        self._tried = False
        self._records: list[dict[str, Tensor]] = []
        self._rows: list[Tensor] = []  # the records of a captured step, each as one row
        self._batches = self._receive(task)
        self._graph = self._graph_of(self._batches) if self.program.captures else None
        if self._graph is None and self.program.network.compiled:
            self._try(self._batches)
        if self._tried:  # by steps that moved what was received
            self._batches = self._receive(task)

    def _receive(self, task: Task) -> Batch:
        """Put a task's model and memory in place; returns its batches with what the method made for all steps."""
        with self._on_stream():
            self.client.receive(task.received, task.key)
            self.client.class_counts.copy_(task.class_counts)
            for value in self.client.state.values():  # nothing of the lane's last client, or of the capture, stays
                value.zero_()
            for name, value in task.memory.items():
                self.client.state[name].copy_(value)
            method = self.program.method
            method.start_round(self.client, {**task.received, **task.memory})
            given = task.batches.for_method(self.program.experiment.method, method.needs)
            return replace(task.batches, made=self.program.attempt(lambda: method.before_steps(self.client, given)))

    def step(self, index: int) -> None:
        """The task's next local step."""
        batch = self._batches.step(index)
        with self._on_stream():
            if self._graph is not None:
                self._rows.append(self._graph.replay(batch))
            else:
                record = self.program.step(self.client, batch)
                self._records.append({name: value.detach().clone() for name, value in record.items()})

    def finish(self) -> Result:
        """Copy what the client sends and remembers to slots of its own."""
        with self._on_stream():
            upload = {name: value.clone() for name, value in self.program.method.upload(self.client).items()}
            memory = {name: self.client.state[name].clone() for name in self.program.method.memory}
            records = (
                {name: torch.stack([r[name] for r in self._records]) for name in self._records[0]}
                if self._graph is None
                else self._graph.records(torch.stack(self._rows))
            )
        del self._batches, self._records, self._rows
        return Result(upload, memory, records)

    def prepare(self, task: Task) -> None:
        """Capture what a task's shape of batch needs before any clock runs."""
        if self.program.captures:
            self.follow()
            self._graph_of(self._receive(task))

    def _on_stream(self):
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def _try(self, batches: Batch) -> None:
        """Find out with a step of these shapes whether the network compiles."""
        batch = batches.step(0)
        shapes = _shapes(batch)
        if shapes not in self._compiled:
            self._tried = True
            with self._on_stream():
                self.program.attempt(lambda: self.program.step(self.client, batch))
            self._compiled.add(shapes)

    def _graph_of(self, batches: Batch) -> "_StepGraph | None":
        batch = batches.step(0)
        shapes = _shapes(batch)
        if shapes not in self._graphs:
            try:
                self._tried = True
                self._graphs[shapes] = _StepGraph(self, batch)
            except (torch.cuda.OutOfMemoryError, FeddureError):
                raise
            except Exception as error:
                self.program.give_up_capturing(error)
                return None
        return self._graphs[shapes]


def _shapes(batch: Batch) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in batch.tensors())


class _StepGraph:
    """One local step as a CUDA graph with static inputs."""

    def __init__(self, lane: Lane, batch: Batch):
        program, client = lane.program, lane.client
        assert lane.stream is not None
        torch.cuda.current_stream().wait_stream(lane.stream)  # which made what the method wants for all steps
        self._inputs = batch.map(lambda tensor: tensor.clone(memory_format=torch.preserve_format))
        lane.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lane.stream):
            for _ in range(3):  # compile, autotune and allocate outside the capture; a task resets the state after
                program.attempt(lambda: program.step(client, self._inputs))
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # The outer one also ends where a failed capture would leave the lane's stream as everybody's.
        with torch.cuda.stream(lane.stream), torch.cuda.graph(self._graph, stream=lane.stream):
            record = program.step(client, self._inputs)
            self._names = [(name, value.shape, value.numel()) for name, value in record.items()]
            values = [value.detach().reshape(-1).to(torch.float32) for value in record.values()]
            self._record = torch.cat(values) if values else torch.zeros(0, device=client.theta.device)
        torch.cuda.synchronize()

    def replay(self, batch: Batch) -> Tensor:
        """One step; what it recorded, as one row."""
        pairs = zip(self._inputs.tensors(), batch.tensors(), strict=True)
        filled = [(mine, given) for mine, given in pairs if mine.numel()]
        torch._foreach_copy_([mine for mine, _ in filled], [given for _, given in filled])
        self._graph.replay()
        return self._record.clone()

    def records(self, rows: Tensor) -> dict[str, Tensor]:
        """The rows of all steps, by name."""
        parts = rows.split([size for _, _, size in self._names], dim=1)
        return {
            name: part.reshape(len(rows), *shape) for (name, shape, _), part in zip(self._names, parts, strict=True)
        }


class Lanes:
    """All lanes of an engine, by program, on a fixed number of streams or threads."""

    def __init__(self, device: torch.device, wanted: int | str):
        self.device = device
        every = AUTO_LANES if device.type == "cuda" else torch.get_num_threads()
        self.limit = every if wanted == "auto" else int(wanted)
        self.overlaps = device.type == "cuda"  # whether the host is free while lanes train
        self._streams: list[torch.cuda.Stream | None] = []
        self._lanes: dict[int, list[Lane]] = {}
        self.stop: Callable[[], bool] = lambda: False

    def run(self, tasks: list[Task], meanwhile: Callable[[], None] = lambda: None) -> list[Result]:
        """Train all of them; results in the order of the tasks.

        On CUDA they are ready for the current stream, and `meanwhile` is called while the lanes are at work.
        """
        results: list[Result | None] = [None] * len(tasks)
        queues = self.deal(tasks)
        for number, queue in enumerate(queues):
            for index in queue:
                self._lane(number, tasks[index].program)  # built by one thread
        workers = [self._work(number, queue, tasks, results) for number, queue in enumerate(queues)]
        if self.overlaps or len(workers) <= 1:
            self._take_turns(workers)
        else:
            try:
                self._side_by_side(workers)
            except _ForOneThread:
                for task in tasks:
                    task.program.threads = False
                return self.run(tasks)
        if self.overlaps:
            meanwhile()
        for stream in self._streams[: len(queues)]:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        return results  # type: ignore[return-value]

    def _take_turns(self, workers: list[Iterator[bool]]) -> None:
        """Each in turn issues one step; on CUDA the issuing runs far ahead of the work."""
        while workers:
            if self.stop():
                raise Stopped
            workers = [worker for worker in workers if next(worker, None) is not None]

    def _side_by_side(self, workers: list[Iterator[bool]]) -> None:
        """Each in a thread with its share of the cores; an error of one ends all."""
        if self.stop():
            raise Stopped
        cores, ended, stopped = torch.get_num_threads(), threading.Event(), False

        def work(worker: Iterator[bool]) -> None:
            torch.set_num_threads(max(1, cores // len(workers)))
            try:
                while not ended.is_set() and next(worker, None):
                    pass
            except BaseException:
                ended.set()
                raise

        try:
            with _without_forward_mode(), ThreadPoolExecutor(len(workers)) as pool:
                try:
                    waiting = futures = [pool.submit(work, worker) for worker in workers]
                    while waiting and not stopped:
                        waiting = list(wait(waiting, _SECONDS_BETWEEN_LOOKS).not_done)
                        stopped = bool(waiting) and self.stop()
                finally:
                    ended.set()
            for future in futures:
                future.result()
            if stopped:
                raise Stopped
        except BaseException:
            self._lanes.clear()  # after a second Ctrl-C a thread may still be at work on them
            raise
        finally:
            torch.set_num_threads(cores)  # a thread's number becomes that of every thread to come

    def prepare(self, tasks: list[Task]) -> None:
        """Build the lanes and capture the graphs that these tasks will need."""
        for number, queue in enumerate(self.deal(tasks)):
            for index in queue:
                self._lane(number, tasks[index].program).prepare(tasks[index])

    def _work(self, number: int, queue: list[int], tasks: list[Task], results: list[Result | None]) -> Iterator[bool]:
        for index in queue:
            task = tasks[index]
            lane = self._lane(number, task.program)
            lane.follow()
            lane.begin(task)
            for step in range(task.steps):
                lane.step(step)
                yield True
            results[index] = lane.finish()

    def deal(self, tasks: list[Task]) -> list[list[int]]:
        """Longest task first, each to the lane with the least work so far."""
        count = self._count(tasks)
        queues: list[list[int]] = [[] for _ in range(count)]
        load = [0.0] * count
        costs = [task.steps * task.program.cost(task.batches) for task in tasks]
        for index in sorted(range(len(tasks)), key=lambda index: -costs[index]):
            lane = load.index(min(load))
            queues[lane].append(index)
            load[lane] += costs[index]
        return queues

    def _count(self, tasks: list[Task]) -> int:
        """How many lanes: as many as are wanted and, on a CPU, as can be threads and fit into its memory."""
        count = min(self.limit, len(tasks))
        if self.overlaps or count <= 1:
            return count
        if not all(task.program.threads and task.program.network.reentrant for task in tasks):
            return 1
        if any(task.program.network.compiled for task in tasks):
            return 1
        return max(1, min(count, environment.memory() // 2 // max(map(_bytes, tasks))))

    def _lane(self, number: int, program: Program) -> Lane:
        lanes = self._lanes.setdefault(id(program), [])
        while len(lanes) <= number:
            if len(self._streams) <= len(lanes):
                # Before everything else on the device, such as the next round's images and the evaluation.
                self._streams.append(torch.cuda.Stream(priority=-1) if self.device.type == "cuda" else None)
            lanes.append(Lane(len(lanes), program, self._streams[len(lanes)]))
        return lanes[number]

    def release(self) -> None:
        """Give the lanes' memory back; they are built anew when needed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._lanes.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def fewer(self) -> bool:
        """After running out of memory: half the lanes, all built anew. False when there is only one."""
        if self.limit <= 1:
            return False
        self.limit = max(1, self.limit // 2)
        self.release()
        warnings.warn(f"out of GPU memory: going on with {self.limit} lanes", FeddureWarning, stacklevel=3)
        return True


@contextmanager
def _without_forward_mode() -> Iterator[None]:
    """No step enters forward mode here: two threads in it would clear each other's derivatives, and say nothing."""
    enter = forward_ad.enter_dual_level

    def refuse() -> None:
        raise _ForOneThread

    forward_ad.enter_dual_level = refuse
    try:
        yield
    finally:
        forward_ad.enter_dual_level = enter


def _bytes(task: Task) -> int:
    """About what a client in training takes."""
    images = [tensor for tensor in task.batches.tensors() if tensor.dim() >= 5]
    height, width = images[0].shape[-2:]
    rows = [tensor.shape[1:-3].numel() for tensor in images]
    at_once = min(task.program.network.piece, max(rows) * task.steps)
    vectors = _VECTORS * task.program.network.parameters.size * task.program.network.master.itemsize
    return height * width * (_TRAINED * sum(rows) + _LABELLED * at_once) + vectors
