"""Programs that a model wrote, run where they can only compute: to see what they print (`run`), or judged by tests that
they never see (`run_tests`).

running         `run`; judging: `run_tests`
child           how both start a process of the sandbox, read what it says, and end it
zygote          the process that all others are forked from; worker_process keeps it
program         what runs in a program's process; judge: what runs beside it, in a process of its own
plain_data      values and messages between the two
confinement     what both processes may still ask of the operating system
"""

from __future__ import annotations

from tilebeam.sandbox.child import SECONDS, need_confinement
from tilebeam.sandbox.judging import Test, Verdict, run_tests
from tilebeam.sandbox.running import Run, run

__all__ = ["SECONDS", "Run", "Test", "Verdict", "need_confinement", "run", "run_tests"]
