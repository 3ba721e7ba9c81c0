"""The command line. A user's mistake is one line on stderr and exit code 2; Ctrl-C is 130; a bug is a traceback.

Nothing heavy is imported here: the modules of the commands import only typer, and the rest when they run.
"""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from agentrl import __version__
from agentrl.cli.chat import chat_command
from agentrl.cli.check import check_command
from agentrl.cli.compare import compare_command
from agentrl.cli.continue_ import continue_command
from agentrl.cli.data import data_command
from agentrl.cli.doctor import doctor_command
from agentrl.cli.evaluate import eval_command
from agentrl.cli.listing import LISTED, list_command, presets_command
from agentrl.cli.new import new_app
from agentrl.cli.recipes import recipes_command
from agentrl.cli.replay import replay_command
from agentrl.cli.rescore import rescore_command
from agentrl.cli.rollout import rollout_command
from agentrl.cli.serve import serve_command
from agentrl.cli.sft import reward_model_command, sft_command
from agentrl.cli.show import show_command
from agentrl.cli.train import train_command
from agentrl.cli.try_ import try_command
from agentrl.cli.view import view_command
from agentrl.cli.why import why_command
from agentrl.errors import UserError, printable

BAD_USAGE = 2
INTERRUPTED = 130
GRACE = 5.0  # seconds for threads of plugins to end, once a command is done
SAVING = "agentrl-save"  # the name of a thread that writes a checkpoint
# typer brings its own copy of click in some versions and uses the package in others; this finds the base class in both.
_ClickError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="agentrl",
    help="Train language-model agents that use tools over many turns, with reinforcement learning.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        version_command()
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(BAD_USAGE)


def version_command() -> None:
    """Print the version."""
    typer.echo(f"agentrl {__version__}")


app.command("train")(train_command)
app.command("eval")(eval_command)
app.command("compare")(compare_command)
app.command("sft")(sft_command)
app.command("reward-model")(reward_model_command)
app.command("check")(check_command)
app.command("doctor")(doctor_command)
app.command("try")(try_command)
app.command("serve")(serve_command)
app.command("chat")(chat_command)
app.command("show")(show_command)
app.command("rollout")(rollout_command)
app.command("rescore")(rescore_command)
app.command("replay")(replay_command)
app.command("continue")(continue_command)
app.command("why")(why_command)
app.command("view")(view_command)
app.add_typer(new_app, name="new")
app.command("data")(data_command)
app.command("recipes")(recipes_command)
for _group, _what in LISTED.items():
    _help = f"List the {_what} that are installed, and where they come from."
    app.command(_group, help=_help, rich_help_panel="What is installed")(list_command(_group))
app.command("presets", rich_help_panel="What is installed")(presets_command)
app.command("version")(version_command)


def run(arguments: Sequence[str]) -> int:
    """Run one command in this process and return the exit code."""
    _show_log_lines()
    try:
        code = app(args=list(arguments), prog_name="agentrl", standalone_mode=False)
    except UserError as error:
        return _say(str(error))
    except _ClickError as error:
        return _say(_usage(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def main() -> None:
    """Run the command of `sys.argv`, and end the process with its exit code."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # report an unreachable hub in one line, not at every try
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # so that a recipe can name `my_module:thing` of a file here, as with `python -m`
    code = 1  # that of a traceback
    try:
        code = run(sys.argv[1:])
    finally:
        if code == INTERRUPTED:  # all is closed by now, except a tool's thread that hangs
            _exit_now(code)
        _exit_soon(code)
    sys.exit(code)


class _LogLines(logging.Handler):
    """Writes each log record to the current stderr, with its control characters made visible."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            sys.stderr.write(printable(self.format(record)) + "\n")


def _show_log_lines() -> None:
    """Print the warnings of agentrl's loggers so that the texts of plugins in them cannot control the terminal."""
    log = logging.getLogger("agentrl")
    if not any(isinstance(handler, _LogLines) for handler in log.handlers):
        log.addHandler(_LogLines(logging.WARNING))


def _exit_soon(code: int) -> None:
    """End the process when threads of plugins still run after GRACE; the interpreter would wait for them forever.

    What runs after they have ended (`atexit`) has all the time it needs.
    """
    joined = threading.Event()
    atexit.register(joined.set)  # the last registered is called first

    def leave() -> None:
        for thread in threading.enumerate():
            if thread.name == SAVING:  # let it finish a checkpoint
                thread.join()
        if not joined.wait(GRACE):
            names = ", ".join(
                t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()
            )
            with suppress(OSError, ValueError):
                typer.echo(f"agentrl: exited while a plugin's thread was still running ({names})", err=True)
            _exit_now(code)

    threading.Thread(target=leave, name="agentrl-exit", daemon=True).start()


def _exit_now(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # no one reads it any more
            stream.flush()
    os._exit(code)


def _say(message: str) -> int:
    from agentrl.recipe.secrets import masked_text

    with suppress(OSError):  # stderr may be closed too
        typer.echo(printable(f"error: {masked_text(' '.join(message.split()))}"), err=True)
    return BAD_USAGE


def _usage(error: BaseException) -> str:
    """Return click's message, and the command that shows the help."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "agentrl"
    message = getattr(error, "format_message", error.__str__)()
    return f"{message.rstrip('.')}; see {command} --help"


if __name__ == "__main__":
    main()
