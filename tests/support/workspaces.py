"""Workspaces of the provider `bwrap`, and sessions in them."""

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl_tools.workspaces.bwrap import BwrapProvider

from agentrl import Session, Task, Tool
from agentrl.workspace.provider import WorkspaceLimits, WorkspaceSpec
from agentrl.workspace.workspace import MIB, Workspace


@asynccontextmanager
async def opened(count: int = 1, disk: int = 256 * MIB) -> AsyncIterator[list[Workspace]]:
    provider = BwrapProvider()
    try:
        yield [await provider.open(WorkspaceSpec(limits=WorkspaceLimits(disk=disk))) for _ in range(count)]
    finally:
        await provider.close()


def session_in(workspace: Workspace | None) -> Session:
    return Session("task#0", Task("task", {}), random.Random(0), time.monotonic() + 600, workspace=workspace)


@asynccontextmanager
async def used(tool: Tool, workspace: Workspace) -> AsyncIterator[Session]:
    """A session of a tool, from `create` to `release`."""
    session = session_in(workspace)
    await tool.create(session)
    try:
        yield session
    finally:
        await tool.release(session)
