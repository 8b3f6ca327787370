"""The command line: one file for each family of commands.

A command returns its exit code: 0 good, 1 the answer is bad, 2 misuse. Errors of the project's tree
become one message, never a traceback; anything else is a bug, and keeps its traceback. Reading
commands must start fast, so nothing here imports torch or Ray until a command needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from coherent_ray import __version__
from coherent_ray.cli import (
    diff,
    drill,
    export,
    inspect,
    launch,
    prove,
    prune,
    receipts,
    save,
    validate,
    verify,
)
from coherent_ray.cli.output import drop_output, show_error, show_output_lost, while_printing
from coherent_ray.errors import CoherentRayError, ConfigError

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""


class Main(click.Group):
    """The group of all commands, with errors and exit codes as promised above."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run the command line and exit.

        Args:
            args: Arguments; None: the process's.
            prog_name: Name of the program in messages.
            complete_var: Environment variable that asks for shell completion.
            standalone_mode: Ignored: this always ends in `SystemExit`.
            extra: Passed to click's context.
        """
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = self._told(words, prog_name, complete_var, **extra)
        except BrokenPipeError:
            drop_output()
            code = 1
        except OSError as error:
            if not while_printing(error):
                raise
            drop_output()
            show_output_lost(error)
            code = 1
        sys.exit(code)

    def _told(
        self, words: list[str], prog_name: str | None, complete_var: str | None, **extra: Any
    ) -> int:
        """Run a command, tell the error that ends it, and return the exit code."""
        as_json = "--json" in words
        try:
            code = super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
        except click.UsageError as error:
            if as_json:
                show_error(ConfigError(error.format_message()), as_json=True)
            else:
                error.show()
            return 2
        except click.Abort:
            click.echo("interrupted", err=True)
            return INTERRUPTED
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except CoherentRayError as error:
            show_error(error, as_json=as_json)
            return error.exit_code
        return code if isinstance(code, int) else 0


@click.group(
    cls=Main, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="coherent-ray")
def main() -> None:
    """Train on Ray clusters that fail: whole generations, bit-for-bit resume.

    RUN is a run's directory, its address or its configuration file. RUN@g12 names its
    generation 12, RUN@g12-a3 the one that attempt 3 published, RUN@latest the latest.

    Exit codes: 0 good, 1 the answer is bad (damage, refusal, failure), 2 misuse.
    """


for _family in (
    launch,
    save,
    inspect,
    verify,
    receipts,
    diff,
    export,
    prune,
    drill,
    prove,
    validate,
):
    for _command in _family.COMMANDS:
        main.add_command(_command)
