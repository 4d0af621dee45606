"""The command line: one verb per thing a script or a cluster job needs.

The verbs call the functions the notebooks call. Errors of input end with status 2 and one line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from xstage_lab.errors import XStageError

DESCRIPTION = "Measure and predict post-issue backpressure of fused communication kernels."
EPILOG = """Times are seconds, rates bytes per second, sizes bytes. Examples:

  python -m xstage_lab predict --workload burst --producers 148 --bytes 32768 --gap 3e-6
  python -m xstage_lab compare --workload fused-gemm --m 8192 --n 8192 --k 4096 --json
  python -m xstage_lab tune --workload moe --model DSv4-Pro --budget 12
  python -m xstage_lab calibrate --machine H100-SXM --out h100.json
  python -m xstage_lab record --device cuda --out records
  python -m xstage_lab explain --timings data/timings_example.csv
  python -m xstage_lab trace --workload fused-gemm --k 1024 --out run.json.gz
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status."""
    parser = _parser()
    options = parser.parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    try:
        result, lines = options.run(options)
    except XStageError as error:
        print(f"xstage_lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("xstage_lab: stopped", file=sys.stderr)
        return 130
    if options.json:
        from xstage_lab.record import to_plain
        print(json.dumps(to_plain(result), allow_nan=False))
        return 0
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xstage_lab", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, run: Callable[..., Any], text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        return added

    from xstage_lab import command, command_timings, command_tune
    for name, run, text in (
        ("predict", command.predict, "what the law says of a workload"),
        ("measure", command.measure, "run a workload on a device"),
        ("compare", command.compare, "measure a workload and set the prediction beside it"),
        ("export", command.export, "figures, data and parameters of a workload as files"),
    ):
        added = verb(name, run, text)
        _add_machine(added)
        _add_workload(added)
    tune = verb("tune", command_tune.tune, "the best tile, depth, order; and whether to fuse")
    _add_machine(tune)
    _add_workload(tune)
    _add_search(tune)
    calibrate = verb("calibrate", command.calibrate, "measure the law's parameters on a device")
    _add_machine(calibrate)
    calibrate.add_argument("--producers", type=_number, help="producers K (default: every SM)")
    calibrate.add_argument("--bytes", type=_number, default=32768, help="burst of one producer, B")
    record = verb("record", command.record, "check, calibrate and sweep a machine into a folder")
    _add_machine(record)
    record.add_argument("--producers", type=_number, help="of sockets: processes that store")
    record.add_argument("--minutes", type=_number, default=5, help="time for all (default 5)")
    paper = verb("paper", command.paper, "published numbers beside the law and the model")
    paper.add_argument("--table", metavar="NAME", help="one table (default: all of them)")
    explain = verb("explain", command_timings.explain, "your own tile times beside the law")
    _add_timings(explain)
    trace = verb("trace", command_timings.trace, "a timeline for ui.perfetto.dev")
    trace.add_argument("--timings", help="trace a file of per-tile times instead of a workload")
    trace.add_argument("--record", help="trace a record, FILE.npz")
    _add_machine(trace)
    _add_workload(trace)
    demo = verb("demo", command.demo, "the whole way once, without a browser")
    demo.add_argument("--out", default="demo-figures", help="folder for the figures")
    verb("doctor", command.doctor, "what this computer has and lacks for the lab")
    lab = verb("lab", command.lab, "open the notebooks in JupyterLab")
    lab.add_argument("--port", type=int, default=8888)
    return parser


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine and device")
    group.add_argument("--machine", default="B200-SXM",
                       help="a named machine, or a file of your own: FILE.csv or FILE.csv:NAME "
                            "(default B200-SXM)")
    group.add_argument("--link", help="a named link instead of the machine's own")
    group.add_argument("--device", default="simulated",
                       help="simulated (default), sockets (live, on this computer), cuda (the "
                            "GPUs of this computer; cuda:peer, cuda:host or cuda:local say where "
                            "they store), or recorded:FOLDER to replay records")
    group.add_argument("--store-path", help="of cuda: registers (default) or bulk")
    group.add_argument("--signal", help="of cuda: none (default), release or fence")
    group.add_argument("--calibration", help="a calibration file instead of calibrating")
    group.add_argument("--seed", type=_number, default=0)
    group.add_argument("--out", help="file or folder to write to")
    _add_supplied(parser)


def _add_supplied(parser: argparse.ArgumentParser) -> None:
    supplied = parser.add_argument_group("supply or override a parameter (marked ASSUMED)")
    for name, what in (("drain-bytes-per-s", "drain rate R"), ("capacity-bytes", "capacity Q"),
                       ("per-sm-bytes-per-s", "one SM's issue rate"),
                       ("issue-latency-s", "start-up of a burst's issue, t0")):
        supplied.add_argument(f"--{name}", type=_number, help=what)


def _add_timings(parser: argparse.ArgumentParser) -> None:
    """Add the options of times that others took: no device runs, but its machine is needed."""
    parser.set_defaults(device="simulated", store_path=None, signal=None)
    parser.add_argument("--timings", required=True, help="CSV file, a row for each tile")
    parser.add_argument("--machine", help="what it ran on, as in the other verbs (default: as the "
                        "file says, # machine: NAME)")
    parser.add_argument("--link", help="a named link instead of the machine's own")
    parser.add_argument("--source", help="who measured, and what")
    parser.add_argument("--depth", type=_number, help="issue depth of the kernel")
    parser.add_argument("--gpus", type=_number, help="GPUs that took part")
    parser.add_argument("--calibration", help="a calibration file instead of published figures")
    parser.add_argument("--out", help="save the times as a record, FILE.npz")
    _add_supplied(parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", default="fused-gemm", help="burst, fused-gemm (default), "
                        "ulysses or moe")
    parser.add_argument("--gpus", type=_number, help="GPUs taking part (default: burst 2, or all "
                        "of a full mesh; others 8)")
    burst = parser.add_argument_group("burst train")
    burst.add_argument("--producers", type=_number, help="producers K (default: every SM)")
    burst.add_argument("--bytes", type=_number, help="burst of one producer, B (default 32768)")
    burst.add_argument("--gap", type=_number, help="gap G in seconds (default 3e-6)")
    burst.add_argument("--bursts", type=_number, help="bursts of each producer, N (default 50)")
    burst.add_argument("--sync", help="free (default) or lockstep")
    tiles = parser.add_argument_group("tiles of all but burst trains")
    tiles.add_argument("--tile", help="MxNxK (default 128x128x64; of attention M queries and N "
                       "keys, by default what fits)")
    tiles.add_argument("--depth", type=_number, help="issue depth (default 2)")
    tiles.add_argument("--dtype", help="operands of GEMMs and MoE layers: bf16 (default of a "
                       "GEMM) or fp8 (of a MoE layer)")
    gemm = parser.add_argument_group("fused GEMM, each GPU's own")
    for name, size in (("m", 8192), ("n", 8192), ("k", 4096)):
        gemm.add_argument(f"--{name}", type=_number, help=f"elements (default {size})")
    gemm.add_argument("--destinations", help="round-robin (default), row-owner, "
                      "row-owner-unrotated or hot:SHARE")
    gemm.add_argument("--out-dtype", help="bf16 (default) or fp32")
    model = parser.add_argument_group("a model's layer")
    model.add_argument("--model", help="a published shape (default: ulysses Wan2-14B-480p, moe "
                       "DSv4-Pro)")
    model.add_argument("--tokens", type=_number, help="ulysses: of the whole sequence (default: "
                       "the model's); moe: of each GPU (default 4096)")
    moe = parser.add_argument_group("MoE layer")
    moe.add_argument("--routing", help="balanced (default), zipf:EXPONENT, or the rows of each "
                     "expert with commas between")
    moe.add_argument("--order", help="wave (default) or interleaved")
    moe.add_argument("--wave-experts", type=_number, help="a GPU's experts in a wave (default: "
                     "the fewest whose Linear-1 gives every SM two tiles)")
    ulysses = parser.add_argument_group("Ulysses attention")
    ulysses.add_argument("--mode", help="fused (default), dedicated or serial")
    ulysses.add_argument("--causal", action="store_true", default=None,
                         help="queries see the keys up to their own")
    ulysses.add_argument("--comm-sms", type=_number, help="of dedicated: SMs that only send "
                         "(default 16)")


def _add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search; those of the workload fix what they name."""
    group = parser.add_argument_group(
        "search", "--tile, --depth and --order, where given, are kept; the rest is searched")
    group.add_argument("--budget", type=_number, help="measurements at most (default: 5 %% of "
                       "the configurations, at least 8); 0 asks the law alone")
    group.add_argument("--gpu-counts", help="GPU counts to choose from, such as 2,4,8, compared "
                       "at equal work (default: --gpus alone)")
    group.add_argument("--smem-bytes", type=_number, help="shared memory that a CTA may take")
    group.add_argument("--max-sms", type=_number, help="SMs that the kernel may take")


def _joined(arguments: Sequence[str]) -> list[str]:
    """Join an option and a negative value: argparse takes -1e-6 for an option of its own."""
    joined: list[str] = []
    for argument in arguments:
        negative = argument.startswith("-") and isinstance(_number(argument), int | float)
        if negative and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _number(text: str) -> int | float | str:
    """Return a number, or the text for the field's own check to name."""
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    sys.exit(main())
