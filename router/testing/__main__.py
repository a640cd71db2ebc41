"""Run a local provider in a process of its own: `python -m router.testing --port 8080 --model strong=2/10`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from fractions import Fraction

from router.testing import LocalProvider, Rates


def _priced(text: str) -> tuple[str, Rates]:
    name, _, rates = text.rpartition("=")
    given, _, got = rates.partition("/")
    try:
        wrong = not name or Fraction(given) < 0 or Fraction(got) < 0
    except (ValueError, ZeroDivisionError):
        wrong = True
    if wrong:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=INPUT/OUTPUT, in dollars per million tokens")
    return name, Rates(input=given, output=got)


def main() -> None:
    """Serve until the process is told to end (SIGTERM, SIGINT); one line of JSON says when it listens, and where."""
    parser = argparse.ArgumentParser(prog="python -m router.testing", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="where to listen on 127.0.0.1 (a free port unless said)")
    parser.add_argument(
        "--model",
        type=_priced,
        action="append",
        default=[],
        metavar="NAME=INPUT/OUTPUT",
        help="the price of a model in dollars per million tokens; may be given again",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with LocalProvider(prices=dict(options.model), port=options.port) as provider:
        account = provider.base_url.removesuffix("/v1") + "/account"
        sys.stdout.write(json.dumps({"base_url": provider.base_url, "account": account}) + "\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


main()
