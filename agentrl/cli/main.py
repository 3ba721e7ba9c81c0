"""The command line. A user's mistake is one line on stderr and exit code 2; Ctrl-C is 130; a bug is a traceback.

Nothing heavy is imported here: the modules of the commands import only typer, and the rest when they run.
"""

import atexit
import faulthandler
import gc
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agentrl import __version__
from agentrl.cli.audit import audit_command
from agentrl.cli.chat import chat_command
from agentrl.cli.check import check_command
from agentrl.cli.compare import compare_command
from agentrl.cli.continue_ import continue_command
from agentrl.cli.data import data_command
from agentrl.cli.doctor import doctor_command
from agentrl.cli.env import env_app
from agentrl.cli.evaluate import eval_command
from agentrl.cli.listing import LISTED, list_command, presets_command
from agentrl.cli.new import new_app
from agentrl.cli.recipes import recipes_command
from agentrl.cli.replay import replay_command
from agentrl.cli.rescore import rescore_command
from agentrl.cli.rollout import rollout_command
from agentrl.cli.scan import scan_command
from agentrl.cli.serve import serve_command
from agentrl.cli.sft import reward_model_command, sft_command
from agentrl.cli.show import show_command
from agentrl.cli.sweep import sweep_command
from agentrl.cli.train import train_command
from agentrl.cli.try_ import try_command
from agentrl.cli.view import view_command
from agentrl.cli.why import why_command
from agentrl.errors import UserError, printable
from agentrl.secrets import masked_text

BAD_USAGE = 2
INTERRUPTED = 130
GRACE = 5.0  # seconds for threads of plugins to end, once a command is done
AT_EXIT = 60.0  # and for what they registered by `atexit`, afterwards
SAVING = "agentrl-save"  # the name of a thread that writes a checkpoint
# typer brings its own copy of click in some versions and uses the package in others; this finds the base class in both.
_ClickError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class _Commands(TyperGroup):
    """Lists the commands under the headings that they name, as plain text: to draw it costs more than all the rest."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, heading by heading."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            rows.setdefault(str(heading), []).append((name, command.get_short_help_str(limit=500)))
        for heading, found in rows.items():
            with formatter.section(heading):
                formatter.write_dl(found)


app = typer.Typer(
    name="agentrl",
    cls=_Commands,
    rich_markup_mode=None,
    help="Train language-model agents that use tools over many turns, with reinforcement learning.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
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
app.command("sweep")(sweep_command)
app.command("eval")(eval_command)
app.command("compare")(compare_command)
app.command("sft")(sft_command)
app.command("reward-model")(reward_model_command)
app.command("check")(check_command)
app.command("audit")(audit_command)
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
app.command("scan")(scan_command)
app.command("view")(view_command)
app.add_typer(new_app, name="new")
app.add_typer(env_app, name="env")
app.command("data")(data_command)
app.command("recipes")(recipes_command)
for _group, _what in LISTED.items():
    _help = f"List the {_what} that are installed, and where they come from."
    app.command(_group, help=_help, rich_help_panel="What is installed")(list_command(_group))
app.command("presets", rich_help_panel="What is installed")(presets_command)
app.command("version")(version_command)


def run(arguments: Sequence[str]) -> int:
    """Run one command in this process and return the exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError, ValueError):  # it is closed, or another file than it was
            sys.stdout.reconfigure(errors="backslashreplace")  # what its encoding lacks ends no command
    _show_log_lines()
    try:
        with _ended_by_signals():
            code = app(args=list(arguments), prog_name="agentrl", standalone_mode=False)
    except UserError as error:
        return _say(str(error))
    except _ClickError as error:
        return _say(_usage(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM, and a terminal that closes, end a command as Ctrl-C does: nothing that it made is left behind."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # else somebody has other plans, as `nohup` has
                previous[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in previous:
            signal.signal(number, signal.SIG_DFL)


def main() -> None:
    """Run the command of `sys.argv`, and end the process with its exit code."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # report an unreachable hub in one line, not at every try
    if "OMP_WAIT_POLICY" not in os.environ:  # torch's threads spin 10,000 times, not 300,000, before they sleep
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # else two runs on the same cores take thrice the time of one
    sys.excepthook = _show_bug
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


def _show_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more
        sys.stderr.write(printable(masked_text("".join(traceback.format_exception(kind, error, trace)))))


class _LogLines(logging.Handler):
    """Writes each log record to the current stderr, with its control characters made visible."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            sys.stderr.write(printable(masked_text(self.format(record))) + "\n")


def _show_log_lines() -> None:
    """Print the warnings of agentrl's loggers so that the texts of plugins in them cannot control the terminal."""
    log = logging.getLogger("agentrl")
    if not any(isinstance(handler, _LogLines) for handler in log.handlers):
        log.addHandler(_LogLines(logging.WARNING))


def _exit_soon(code: int) -> None:
    """End the process when threads of plugins still run after GRACE, or what is to run at exit after AT_EXIT: the
    interpreter would wait for them forever. Code that even holds the interpreter then ends with exit code 1."""
    gc.freeze()  # else the interpreter looks through all objects, for one to three seconds once torch is there
    joined = threading.Event()

    def at_exit() -> None:
        joined.set()
        with suppress(AttributeError, OSError, RuntimeError, ValueError):  # stderr is closed
            faulthandler.dump_traceback_later(AT_EXIT + GRACE, exit=True)

    atexit.register(at_exit)  # the last registered is called first

    def leave() -> None:
        for thread in threading.enumerate():
            if thread.name == SAVING:  # let it finish a checkpoint
                thread.join()
        if not joined.wait(GRACE):
            names = ", ".join(
                t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()
            )
            _leave(f"a plugin's thread was still running ({names})", code)
        time.sleep(AT_EXIT)  # ended in its midst, where all goes well
        _leave(f"{_running()}, which was to run at exit, had not ended after {AT_EXIT:g} s", code)

    threading.Thread(target=leave, name="agentrl-exit", daemon=True).start()


def _running() -> str:
    """Name the function that the main thread was asked to call, the first one outside of the standard library."""
    frames = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    standard = (sysconfig.get_path("stdlib"), "<frozen")
    named = [f for f in frames if "site-packages" in f.filename or not f.filename.startswith(standard)] or frames
    return f"{named[0].name} ({os.path.basename(named[0].filename)}:{named[0].lineno})" if named else "a function"


def _leave(why: str, code: int) -> None:
    with suppress(OSError, ValueError):
        typer.echo(f"agentrl: exited while {why}", err=True)
    _exit_now(code)


def _exit_now(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # no one reads it any more
            stream.flush()
    os._exit(code)


def _say(message: str) -> int:
    with suppress(OSError):  # stderr may be closed too
        typer.echo(printable(f"error: {masked_text(' '.join(message.split()))}"), err=True)
    return BAD_USAGE


def _usage(error: BaseException) -> str:
    """Click's message, and the command that shows the help."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "agentrl"
    message = getattr(error, "format_message", error.__str__)()
    return f"{message.rstrip('.')}; see {command} --help"


if __name__ == "__main__":
    main()
