"""`parity agent`: offers this host to a run that waits for it with ``--hosts`` (docs/guides/hosts.md)."""

import argparse
import sys

from conformance.core.errors import UsageError
from conformance.runtime.multihost import agent


class _AgentCommand:
    help = "start the ranks of a run on another host (parity run --hosts)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("controller", metavar="HOST:PORT", help="what the run was told with --listen")
        parser.add_argument(
            "--slots",
            type=_slots,
            metavar="N",
            help="ranks to offer (default: visible GPUs, times --ranks_per_gpu of the run, or processors on the CPU)",
        )

    def run(self, options: argparse.Namespace) -> int:
        return agent.run(options)


def _slots(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks")
    return int(text)


AGENT_COMMAND = _AgentCommand()


def main() -> int:
    """The command alone, without the imports of the others; engines start it so."""
    parser = argparse.ArgumentParser(prog="parity agent", description=__doc__)
    AGENT_COMMAND.add_arguments(parser)
    try:
        return AGENT_COMMAND.run(parser.parse_args())
    except UsageError as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
