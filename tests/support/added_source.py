"""Sources for `agentrl env add`: the toy of `foreign_toy.py`, whose virtual environment needs nothing."""

from pathlib import Path

from agentrl.errors import UserError
from agentrl.plugins.source import Source

HERE = Path(__file__).parent


class Toy(Source):
    about = "a guessing game"
    what = "MOST"
    pins = HERE / "added_source.txt"
    python = ((3, 10), (3, 99))
    fault = ""

    def sections(self, what, python):
        if not what.isdecimal():
            raise UserError(f"there is no game {what!r}")
        args = {"most": int(what), "fault": self.fault}
        module = str(HERE / "foreign_toy.py")
        name = "agentrl_envs.foreign.environment:ForeignEnvironment"
        return {"env": {"name": name, "args": {"python": python, "module": module, "args": args}}}


class Broken(Toy):
    fault = "grade:raise"


class Newer(Toy):
    python = ((3, 97), (3, 99))


class Absent(Toy):
    pins = HERE / "added_source_absent.txt"
