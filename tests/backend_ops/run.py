"""Run upstream's test-backend-ops on the device HMX0 and say how many cases it claims, passes and fails, per op.

    python tests/backend_ops/run.py [--all] [-o OP[,OP]] [-p REGEX] [-j N] [--json FILE]

The program is built once from the llama.cpp source that belongs to the installed llama-cpp-python and linked against
that wheel's own libggml; the plugin comes in through GGML_BACKEND_PATH. Without --all, ops with thousands of cases are
thinned out by the patterns in OPS. The exit status is 1 if a claimed case fails, if the program dies, or if an op that
the device must run is claimed for fewer cases than OPS demands.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kits"))
import upstream


@dataclass(frozen=True)
class Op:
    """What is asked of one op: the smallest number of claimed cases (full set), and the thinned-out set with its."""

    claimed: int
    quick: str = ""  # regex over the case's parameters; "" = all cases
    quick_claimed: int = 1

    @property
    def least(self) -> int:
        """Of the thinned-out set, the smallest number of claimed cases."""
        return self.quick_claimed if self.quick else self.claimed


# Of what broadcasts: not the largest cases. ADD has one of them.
_SMALL = r"^(?!.*(262144|65536))"

# The ops of a whole transformer layer. `claimed` is a floor against a silent fall-back to the CPU, not a target.
OPS: dict[str, Op] = {
    # The program quantizes the weights itself, K-quants of thousands for seconds; for IQ1 and IQ2_S it looks for its
    # tables for 8 and 4 s first (their products: tests/npu/test_gemm_k.py, and whole models).
    "MUL_MAT": Op(
        700, r"^(?!.*type_a=(iq1|iq2_s|(q[2356]_K|iq2).*k=\d{4}|q4_K.*m=\d{4}|(iq|q4_1|q4_K).*bs=\[1536))", 1000
    ),
    # Thousands of combinations: every head size a layer may have, with one and many queries, on a full and a ragged KV.
    "FLASH_ATTN_EXT": Op(
        2200, r"hsk=(64|80|96|128|256),.*(kv=113,nb=(1|75)|kv=1024,nb=(1|3)),.*softcap=(0|10)\..*type_K=(f16|q8_0)"
    ),
    "RMS_NORM": Op(50),
    "MUL": Op(90, _SMALL, 80),
    "ADD": Op(100, r"^(?!.*(262144|b?f16.*65536))", 90),
    # Of thousands of tokens each mode with every option.
    "ROPE": Op(
        470,
        r"^(?!.*ne_a=\[\d+,\d+,\d{4},)"
        r"|type=f32,.*fs=1\.4.*ef=0\.7.*af=1\.4.*ff=1",
        300,
    ),
    "SET_ROWS": Op(140),
    "SWIGLU": Op(16),
    "GEGLU": Op(16),
    "SCALE": Op(4),
    "SOFT_MAX": Op(210),
    "GET_ROWS": Op(60, r"m=(1|5),(?!.*be1=700)", 50),
    "CPY": Op(170),
    "CONT": Op(70, r"^(?!.*ne=\[\d{4})"),
    # What sampling on the device runs.
    "SUB": Op(100, _SMALL, 90),
    "DIV": Op(100, _SMALL, 90),
    "EXP": Op(12),
    "STEP": Op(12),
    "LOG": Op(6),
    "CLAMP": Op(6),
    "FILL": Op(4),
    "SUM": Op(7),
    "CUMSUM": Op(15),
    "ARGMAX": Op(7),
    "ARGSORT": Op(98, r"ne=\[\d{1,4},"),
    "TOP_K": Op(500, r"ne=\[(1023|2047|65000|262144)\b|k=(1|15|400)\b"),
    "PAD": Op(4),
    # Mixtures of experts.
    # The program quantizes the experts itself, large ones in K-quants for minutes, and IQ types, too: one of these, and
    # four experts only where all are used.
    "MUL_MAT_ID": Op(
        330,
        r"^(?!.*type_a=((q[2-6]_K|tq|iq).*k=\d{4}|q4_0.*k=2880|iq1|iq2_xxs|iq2_s|iq3|iq2_xs.*(n_mats=8|n=\d[13579],)))"
        r"(?!.*n_mats=(1024|4,n_used=[12],.*m=512))",
        300,
    ),
    "SUM_ROWS": Op(10),
    # Shapes of other model families.
    "REPEAT": Op(16),
    "L2_NORM": Op(20),
    "CONCAT": Op(64),
    "SQR": Op(4),
    "SQRT": Op(4),
    "ADD_ID": Op(36),
    "SWIGLU_OAI": Op(8),
    "SSM_CONV": Op(45),
    "SSM_CONV_BIAS_SILU": Op(90),
    "SSM_SCAN": Op(15),
    "SSM_SCAN_ROLLBACK": Op(2),
    "GATED_DELTA_NET": Op(36),
    "GATED_DELTA_NET_CACHE_FUSION": Op(5),
    "RWKV_WKV6": Op(4),
    "RWKV_WKV7": Op(5),
    "GATED_LINEAR_ATTN": Op(4),
    "LIGHTNING_INDEXER": Op(102, r"nb=1,|nh=32,.*nb=512,ns=1,.*type_K=(f16|q8_0)"),
    "DSV4_HC_PRE": Op(18),
    "DSV4_HC_POST": Op(9),
    "DSV4_HC_COMB": Op(11),
    "ARANGE": Op(2),
    "POOL_2D": Op(128),
    "ROPE_BACK": Op(400, r"ne_a=\[\d+,\d+,\d,"),
    "NORM": Op(50),
    "NORM_MUL_ADD": Op(20),
    # Activations that stand alone.
    "GELU": Op(12),
    "SILU": Op(12),
    "TANH": Op(12),
}


@dataclass
class Tally:
    """Cases of one op. `kinds` counts the claimed ones by their first type parameter or head size."""

    passed: int = 0
    failed: int = 0
    unsupported: int = 0
    failures: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def claimed(self) -> int:
        return self.passed + self.failed


@dataclass
class Run:
    """Outcome of one invocation of the program."""

    tallies: dict[str, Tally]
    status: int
    tail: str  # the end of what it wrote to stderr


def build() -> Path:
    """Compile the program where that has not been done yet. Takes a minute or two."""
    return upstream.build("test-backend-ops", "backend-ops", ["ggml", "ggml-base", "ggml-cpu"])


def kind_of(op: str, params: str) -> str:
    """The parameter that tells one family of cases of an op from another."""
    names = {"FLASH_ATTN_EXT": ("hsk",), "CPY": ("type_src",), "ROPE": ("mode",)}
    for name in names.get(op, ("type_a", "type", "type_src")):
        if m := re.search(rf"\b{name}=(\w+)", params):
            return m.group(1)
    return "-"


def read_results(sql: str) -> dict[str, Tally]:
    """Tallies from the program's SQL output. A line that a crash cut off is left out."""
    start = sql.find("CREATE TABLE")
    if start < 0:
        return {}
    database = sqlite3.connect(":memory:")
    create, _, rows = sql[start:].partition(");")
    database.execute(create + ")")
    for line in rows.splitlines():
        # What went wrong stands before the row it belongs to: "[CPY] ERR = 0.2 > 0.1 INSERT INTO ..".
        detail, insert, row = line.partition("INSERT INTO ")
        if insert and row.endswith(");"):
            database.execute(insert + row)
            if detail.strip():
                last = "UPDATE test_backend_ops SET error_message = ? WHERE rowid = last_insert_rowid()"
                database.execute(last, (detail.strip(),))
    tallies: dict[str, Tally] = {}
    query = "SELECT op_name, op_params, supported, passed, error_message FROM test_backend_ops"
    for op, params, supported, passed, error in database.execute(query):
        tally = tallies.setdefault(op, Tally())
        if not int(supported):
            tally.unsupported += 1
            continue
        tally.kinds[kind_of(op, params)] += 1
        if int(passed):
            tally.passed += 1
        else:
            tally.failed += 1
            tally.failures.append(f"{op}({params}): {error}")
    database.close()
    return tallies


def run(ops: str, pattern: str = "", jobs: int = 1, timeout: float | None = None) -> Run:
    """Run the cases of `ops` (comma separated) whose parameters match `pattern` on the device, against the CPU."""
    command = [str(build()), "test", "-b", upstream.DEVICE, "-o", ops, "--output", "sql", "-j", str(jobs)]
    if pattern:
        command += ["-p", pattern]
    env = upstream.environment()
    done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=timeout)
    return Run(read_results(done.stdout), done.returncode, done.stderr[-4000:])


# Ops that older releases lack, or that are the CPU backend's there (backend/plugin/ggml_release.cpp).
NEWER = {"SSM_SCAN", "LIGHTNING_INDEXER", "DSV4_HC_PRE", "DSV4_HC_POST", "DSV4_HC_COMB"}


def problems(op: str, result: Run, least: int) -> list[str]:
    """What is wrong with the outcome for one op, as sentences.

    Args:
        least: cases that must be claimed.
    """
    tally = result.tallies.get(op, Tally())
    found = [f"failed: {case}" for case in tally.failures]
    if tally.claimed < least:
        found.append(f"{op} is claimed for {tally.claimed} cases, at least {least} are expected")
    if result.status != 0 and not found:
        found.append(f"test-backend-ops ended with status {result.status}: {result.tail.strip()}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every case, not the thinned-out set")
    parser.add_argument("-o", "--ops", default=",".join(OPS), help="ops to run, comma separated")
    parser.add_argument("-p", "--pattern", default="", help="regex over the parameters of a case, for all ops")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="worker threads of test-backend-ops")
    parser.add_argument("--older", action="store_true", help="an older llama.cpp: ops and cases may be missing")
    parser.add_argument("--json", type=Path, help="also write the tallies here")
    args = parser.parse_args()

    quick = not args.all
    failed = False
    report: dict[str, object] = {}
    print(f"{'op':16} {'claimed':>8} {'passed':>8} {'failed':>8} {'not supported':>14}  claimed by kind")
    for op in args.ops.split(","):
        pattern = args.pattern or (OPS[op].quick if quick and op in OPS else "")
        result = run(op, pattern, args.jobs)
        tally = result.tallies.get(op, Tally())
        kinds = " ".join(f"{kind}:{n}" for kind, n in sorted(tally.kinds.items()))
        numbers = f"{tally.claimed:8} {tally.passed:8} {tally.failed:8} {tally.unsupported:14}"
        print(f"{op:16} {numbers}  {kinds}", flush=True)
        asked = OPS.get(op, Op(0))
        least = min(1, asked.claimed) if args.pattern else asked.least if quick else asked.claimed
        if args.older:  # of fewer ops and cases
            least = 0 if op in NEWER else least // 2 if args.all else min(1, least)
        for text in problems(op, result, least):
            failed = True
            print(f"    {text}", flush=True)
        counts = {"claimed": tally.claimed, "passed": tally.passed, "failed": tally.failed}
        report[op] = {**counts, "unsupported": tally.unsupported, "kinds": dict(tally.kinds)}
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
