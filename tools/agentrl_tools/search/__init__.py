"""Search over a corpus, or over HTTP against a retriever: the tool `search`."""

from agentrl_tools.search.corpus import Document
from agentrl_tools.search.tool import Search

__all__ = ["Document", "Search"]
