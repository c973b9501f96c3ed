"""`isthmus bench kernels`: each op of a platform, beside the framework's own."""
from __future__ import annotations

import argparse
from fnmatch import fnmatch

from ..errors import ConfigError, said
from ..settings import Resolved
from .bench_load import numbers
from .bench_server import add_result_arguments, check_result_files, give, watched

MAX_TOKENS = 1_000_000
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="135m", choices=("135m", "1b", "8b"),
                        help="of the model whose layers are timed [135m]")
    parser.add_argument("--tokens", default="1,16,256", metavar="LIST", help="in a step [1,16,256]")
    parser.add_argument("--behind", type=int, default=1024, metavar="N", help="tokens of context of a decode [1024]")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN",
                        help="ops or labels, with * and ?; may be repeated")
    parser.add_argument("--dtype-of-ops", choices=("f64", "f32", "bf16", "f16"), metavar="NAME",
                        help="f32, bf16 or f16 [the platform's first]")
    add_result_arguments(parser)


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when every op that the platform has was timed, else 1."""
    tokens = [int(n) for n in numbers("--tokens", arguments.tokens, 1, MAX_TOKENS, whole=True)]
    if not 1 <= arguments.behind <= MAX_TOKENS:
        raise ConfigError(f"--behind {arguments.behind}: it must be between 1 and {MAX_TOKENS}")
    check_result_files(arguments)
    from ..bench import ceilings, kernels
    from ..bench.picture import text_of
    from ..bench.result import Result, shown_figure
    from ..bench.steps import Place
    from ..chart import Table
    from ..platform import Unsupported
    from ..startup import claim_platform
    platform, manifest, _ = claim_platform(resolved.config)
    dtype = arguments.dtype_of_ops or manifest.compute_dtypes[0]
    if dtype not in manifest.compute_dtypes:
        raise ConfigError(f"--dtype-of-ops {dtype}: {manifest.name} computes in {', '.join(manifest.compute_dtypes)}")
    place = Place(platform, manifest, dtype)
    runs, notes = [], []
    try:
        chosen = [case for case in kernels.cases(place, kernels.SHAPES[arguments.shape], tokens, arguments.behind)
                  if not arguments.only or any(fnmatch(case.op, p) or fnmatch(case.label, p) for p in arguments.only)]
        if not chosen:
            raise ConfigError(f"--only {' '.join(arguments.only)}: there is no such op; there are embed, linear, "
                              "rms_norm, rope, attention, act_mul, moe and sample")
        with watched() as line:
            line("measure memory and products")
            roof, peer = ceilings.measure(place, 0), kernels.find_peer(manifest.name)
            for case in chosen:
                line("time ops", len(runs) + len(notes), len(chosen))
                try:
                    runs.append(kernels.measure(place, case, peer, roof))
                except Unsupported as error:
                    notes.append(f"{case.label}: unsupported: {error}")
                except Exception as error:  # one op's failure is told, and the others are timed
                    notes.append(f"{case.label}: failed: {type(error).__name__}: {said(error)}"[:300])
    finally:
        getattr(platform, "close", lambda: None)()
    subject = {"model": f"layers of {arguments.shape}", "platform": manifest.name, "device": manifest.device,
               "dtype": dtype}
    about = {"shape": vars(kernels.SHAPES[arguments.shape]), "tokens": tokens, "behind": arguments.behind,
             "peer": peer is not None, "bytes_per_s": roof.bytes_per_s, "operations_per_s": roof.operations_per_s,
             "how": roof.how}
    rows = [[r.label, shown_figure("us", r.figures["us"]), shown_figure("gb_per_s", r.figures["gb_per_s"]),
             shown_figure("roof_share", r.figures["roof_share"]),
             f"{r.detail['peer_us']:,.1f} us" if "peer_us" in r.detail else "-",
             f"{r.figures['peer_ratio']:.2f}" if "peer_ratio" in r.figures else "-"] for r in runs]
    told = [f"{manifest.name} ({manifest.device}), {dtype}, memory {roof.bytes_per_s / 1e9:,.1f} GB/s, products "
            f"{roof.operations_per_s / 1e12:,.3f} TFLOP/s",
            *text_of(Table(["", "time", "read", "of the roof", "the framework's own", "times as fast"], rows))]
    if peer is None:
        notes.append(f"{manifest.name} names no operators of its framework to compare with (its module `peers`)")
    give(Result("kernels", subject, about, runs, notes), told + [f"note: {n}" for n in notes], arguments)
    return FAILED if any(": failed: " in note for note in notes) else 0
