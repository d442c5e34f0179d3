"""Times GPU work by replays of a CUDA graph, for the tuner and benchmarks/gpu.py."""

import statistics
import time
from typing import Any, Callable, List, Sequence, Tuple

import torch


def median_us(
    call: Callable[[torch.Tensor], None], inputs: List[torch.Tensor], replays: int
) -> float:
    """Median over the replays of the mean time of a call; a replay calls with each input."""
    device = inputs[0].device
    if device.type != "cuda":
        return statistics.median(_called_us(call, inputs, replays))
    with torch.cuda.device(device):
        return statistics.median(graph_us(call, inputs, replays))


def graph_us(call: Callable[[Any], object], inputs: Sequence[Any], replays: int) -> List[float]:
    """Microseconds of a call on the current GPU: the mean over the inputs, for each replay."""
    graph = captured(call, inputs)
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = replayed(graph)
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(inputs))
    return times


def captured(call: Callable[[Any], object], inputs: Sequence[Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call with each input: what it takes is the launches' own time and not
    Python's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for item in inputs:
            call(item)
    return graph


def replayed(graph: torch.cuda.CUDAGraph) -> Tuple[torch.cuda.Event, torch.cuda.Event]:
    """The events before and after a replay, which this does not wait for."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    return start, end


def _called_us(call: Callable[[Any], object], inputs: Sequence[Any], replays: int) -> List[float]:
    times = []
    for _ in range(replays + 1):  # the first one warms up
        begin = time.perf_counter()
        for item in inputs:
            call(item)
        times.append((time.perf_counter() - begin) * 1e6 / len(inputs))
    return times[1:]
