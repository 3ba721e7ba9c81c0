"""LangChain: `with_structured_output` in each of its ways; LangGraph: an agent with tools whose answer has a type."""

import json
import os
import sys
from pathlib import Path
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from openai import LengthFinishReasonError
from pydantic import BaseModel

with open(os.environ["AGENTRL_TASK"]) as file:
    question = json.load(file)["messages"][-1]["content"]


class Answer(BaseModel):
    """The answer to a problem."""

    answer: Literal[1, 2, 3, 4, 5, 6, 8, 10, 12, 20, 24, 100]
    sure: Literal["yes", "no"]


@tool
def calculator(expression: str) -> str:
    """Compute."""
    return "4"


model = ChatOpenAI(model=os.environ["AGENTRL_MODEL"])  # address and key from the environment
for method in ("json_schema", "function_calling"):
    print(method, model.with_structured_output(Answer, method=method).invoke(question).answer)
try:
    print("json_mode", model.with_structured_output(None, method="json_mode").invoke(question))
except LengthFinishReasonError:  # the embedded model writes objects of its own until its limit
    print("json_mode: too long")

graph = StateGraph(MessagesState)
forced = model.bind_tools([calculator], tool_choice="any")
graph.add_node("solve", lambda state: {"messages": [forced.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([calculator]))
graph.add_node("answer", lambda state: {"messages": [model.bind(stop=["."]).invoke(state["messages"])]})
for one, other in ((START, "solve"), ("solve", "tools"), ("tools", "answer"), ("answer", END)):
    graph.add_edge(one, other)
print("langgraph", graph.compile().invoke({"messages": [("user", question)]})["messages"][-1].content)
Path(sys.argv[1], os.urandom(8).hex()).touch()
