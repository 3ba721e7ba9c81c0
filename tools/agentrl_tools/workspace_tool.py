"""`WorkspaceTool`: what the tools that work in a workspace share."""

from agentrl import Session, Tool, UserError
from agentrl.plugins.types import Json
from agentrl.workspace.workspace import Workspace


class WorkspaceTool(Tool):
    """A tool that needs a workspace: its recipe sets `workspace.provider`."""

    uses_workspace = True

    async def create(self, session: Session, **create_kwargs: Json) -> None:
        self.workspace(session)

    def workspace(self, session: Session) -> Workspace:
        """The request's workspace. Raises UserError where the recipe opens none."""
        if session.workspace is None:
            raise UserError(
                f"tool {self.name!r} works in a workspace, and this recipe opens none: set workspace.provider, such as "
                f"`workspace: {{provider: bwrap}}`"
            )
        return session.workspace
