"""Runs the multi-process tests of transformers on this machine's CPU, in place of a helper that it does not ship.

The ranks are forked, since a new interpreter needs seconds for its imports and there are dozens of ranks to start.
"""

import multiprocessing
import os
import tempfile
import traceback
import unittest
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120


def start_rank_processes(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Call `function(rank, *args)` in one process for each rank, and raise what the first failing rank raised."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise unittest.SkipTest("the multi-process tests need an operating system that can fork")
    if torch.cuda.is_initialized():
        raise unittest.SkipTest("a process that uses CUDA cannot fork; hide the GPU to run the multi-process tests")
    context = multiprocessing.get_context("fork")
    ranks: list[Any] = []
    reports: list[Any] = []
    for rank in range(nprocs):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(sender, function, rank, args), daemon=True)
        process.start()
        sender.close()  # so that a rank which dies without a report ends the wait for it
        ranks.append(process)
        reports.append(receiver)
    try:
        waiting = list(reports)
        while waiting:
            ready = wait(waiting, timeout=TIMEOUT_S)
            if not ready:
                raise TimeoutError(f"the rank processes did not finish within {TIMEOUT_S} seconds")
            for report in ready:
                waiting.remove(report)
                problem = _problem(report)
                if problem:
                    raise AssertionError(f"rank {reports.index(report)} of {nprocs} failed: {problem}")
    finally:
        for process in ranks:
            process.join(timeout=1)
            if process.is_alive():  # it waits for a rank that failed
                process.kill()


def _problem(report: Any) -> str:
    """The traceback that a rank reported, empty if it ended well."""
    try:
        return report.recv()
    except EOFError:
        return "the process died without a report"


def _rank_main(sender: Any, function: Callable[..., None], rank: int, args: tuple[Any, ...]) -> None:
    problem = ""
    try:
        torch.set_num_threads(1)
        function(rank, *args)
    except BaseException:
        problem = traceback.format_exc()
    sender.send(problem)


def run_distributed(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`run_distributed(2)(test)(*args)` calls `test(rank, *args)` in two processes that form a process group."""

    def wrap(implementation: Callable[..., None]) -> Callable[..., None]:
        def start(*args: Any) -> None:
            with tempfile.TemporaryDirectory() as folder:
                meeting = Path(folder, "rendezvous").as_uri()
                start_rank_processes(_in_group, (implementation, world_size, meeting, args), world_size)

        return start

    return wrap


def _in_group(
    rank: int, implementation: Callable[..., None], world_size: int, meeting: str, args: tuple[Any, ...]
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    try:
        implementation(rank, *args)
    finally:
        dist.destroy_process_group()
