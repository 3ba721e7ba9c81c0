"""BFCL v4 (`bfcl_eval`): its questions, its simulators and its own checkers, single-turn and multi-turn categories.

The model answers by calls of tools, or in the text of BFCL's own prompt, where functions stand in the system message
and calls in brackets. What is checked is what BFCL would have recorded of the same conversation.
"""

import ast
import copy
import itertools
import json
import os
import re
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

CALLS, TEXT = "agentrl-calls", "agentrl-text"
_known = types.ModuleType("bfcl_eval.constants.model_config")  # the real one imports the client of every provider
_known.MODEL_CONFIG_MAPPING = {  # type: ignore[attr-defined]
    CALLS: types.SimpleNamespace(underscore_to_dot=True),  # `math.sqrt` is offered as math_sqrt
    TEXT: types.SimpleNamespace(underscore_to_dot=False),
}
sys.modules["bfcl_eval.constants.model_config"] = _known
os.environ.setdefault("BFCL_PROJECT_ROOT", os.path.join(sys.prefix, "bfcl"))  # it makes folders there

from bfcl_eval import utils as bfcl  # noqa: E402
from bfcl_eval.constants import category_mapping as categories  # noqa: E402
from bfcl_eval.constants import default_prompts as prompts  # noqa: E402
from bfcl_eval.constants.enums import Language, ModelStyle, ReturnFormat  # noqa: E402
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI  # noqa: E402
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker  # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils as simulators  # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker  # noqa: E402
from bfcl_eval.model_handler import utils as handler  # noqa: E402

CATEGORIES = (*categories.SINGLE_TURN_CATEGORY, *categories.MULTI_TURN_CATEGORY)
LATER = "multi_turn_miss_func"
"""The category in which functions are offered in the middle of a conversation."""
Calls = list[dict[str, dict[str, Any]]]
"""Calls as BFCL decodes them: the arguments of each by its function."""
_LITERAL = (
    ast.Expression, ast.Call, ast.Name, ast.Load, ast.keyword, ast.Constant, ast.List, ast.Tuple, ast.Dict,
    ast.UnaryOp, ast.USub,
)  # fmt: skip
_SUM = (ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UnaryOp, ast.USub)
_numbers = itertools.count(1)


class Adapter:
    """categories: names of BFCL's categories or collections (`live`, `multi_turn`), each a held-out split; by default
    all that are carried. train: those whose entries are training tasks; by default none, since it is a benchmark.
    form: `calls`, of tools; or `text`, BFCL's prompt."""

    def __init__(
        self, categories: list[str] | None = None, train: list[str] | None = None, form: str = "calls"
    ) -> None:
        if form not in ("calls", "text"):
            raise ValueError(f"form is {form!r}; expected calls or text")
        self.form = form
        self.categories = _categories(categories, form)
        self.train = [(name, i) for name in _categories(train, form) for i in range(_size(name))] if train else []
        self._read: dict[str, tuple[list[Any], list[Any], list[Any]]] = {}

    def describe(self) -> dict[str, Any]:
        """See docs/foreign.md."""
        later = {} if self.form == "text" else {"functions that come later": f"{LATER} needs `form: text`"}
        return {
            "name": "bfcl",
            "splits": {"train": len(self.train), **{name: _size(name) for name in self.categories}},
            "reward_parts": ["right"],
            "solved": {"right": 1.0},
            "checked": False,  # what arguments may be, the checkers and simulators say
            "cannot": {"memory, web search": "they need a network, or models of their own", **later},
        }

    def entry(self, task: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any], list[Any]]:
        """An entry, its functions as they are shown, and its stored answer (none of what needs no call)."""
        split, index = task["split"], task["index"]
        name, index = self.train[index] if split == "train" else (split, index)
        if name not in self._read:
            plain = bfcl.load_dataset_entry(name, include_prereq=False, include_language_specific_hint=False)
            shown = bfcl.load_dataset_entry(name, include_prereq=False)
            truths = [] if "relevance" in name else bfcl.load_ground_truth_entry(name)
            self._read[name] = plain, [entry["function"] for entry in shown], [row["ground_truth"] for row in truths]
        plain, functions, truths = self._read[name]
        return copy.deepcopy(plain[index]), copy.deepcopy(functions[index]), truths[index] if truths else []

    def task(self, split: str, index: int) -> dict[str, Any]:
        """An entry's id and category, and the tools that it offers."""
        entry, functions, _ = self.entry({"split": split, "index": index})
        if self.form == "text":
            tools = []
        else:
            tools = handler.convert_to_tool(functions, GORILLA_TO_OPENAPI, ModelStyle.OPENAI_COMPLETIONS)
        unlike = {tool["function"]["name"]: tool for tool in tools}  # some entries offer a function twice
        return {"id": entry["id"], "category": _category(entry), "tools": list(unlike.values())}

    def open(self, task: dict[str, Any], seed: int) -> "Single | Several":
        """One rollout."""
        entry, functions, truth = self.entry(task)
        kind = Several if bfcl.is_multi_turn(_category(entry)) else Single
        return kind(self.form, entry, functions, truth)

    def stored(self, task: dict[str, Any]) -> dict[str, Any]:
        """The answer that is kept with the entry."""
        return {"ground_truth": json.dumps(self.entry(task)[2])}

    def demonstrate(self, task: dict[str, Any], seed: int, style: str) -> list[dict[str, Any]]:
        """The stored answer, said in the form that is asked for. Raises ValueError: it is not said by calls."""
        entry, _, truth = self.entry(task)
        category = _category(entry)
        if not bfcl.is_multi_turn(category):
            if not truth and "irrelevance" not in category:
                raise ValueError(f"{entry['id']} stores no answer: any call is right")
            return [_said(self.form, _stored_calls(entry, truth, category))]
        episode, said = Several(self.form, *self.entry(task)), list[dict[str, Any]]()
        for lines in truth:
            each = 1 + len(lines) // prompts.MAXIMUM_STEP_LIMIT  # calls a step: a turn has so many steps at most
            for start in range(0, len(lines), each):
                calls = [_keyword_call(line, entry) for line in lines[start : start + each]]
                said.append(_said(self.form, calls))
                if self.form == "text":
                    said += episode.step(said[-1]) or []
                    continue
                for call in calls:
                    ((name, arguments),) = call.items()
                    said.append({"role": "tool", "content": episode.call(name, arguments)})
            said.append({"role": "assistant", "content": "Done."})
            said += episode.step(said[-1]) or []
        episode.close()
        return said


class Single:
    """An entry of one turn."""

    def __init__(self, form: str, entry: dict[str, Any], functions: list[Any], truth: list[Any]) -> None:
        self._form, self._entry, self._truth = form, entry, truth
        self.messages = _opening(form, entry, functions)

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Nothing is run: what is called is what counts."""
        return {"text": "", "done": True}

    def step(self, message: dict[str, Any]) -> None:
        """Any answer is the last."""

    def grade(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What the checker says of the first answer. One that raises on it has not understood it."""
        category = _category(self._entry)
        said = next((m for m in messages[len(self.messages) :] if m["role"] == "assistant"), {})
        try:
            calls = _decoded(self._form, said, category)
        except Exception:  # noqa: BLE001 - what cannot be decoded is no call
            calls = None
        called = calls is not None and not bfcl.is_empty_output(calls)
        if "relevance" in category:
            return _graded(called != ("irrelevance" in category))
        if calls is None or not bfcl.is_function_calling_format_output(calls):
            return _graded(False)
        functions, name = self._entry["function"], CALLS if self._form == "calls" else TEXT
        try:
            checked = ast_checker(functions, calls, self._truth, _language(category)[0], category, name)
        except Exception:  # noqa: BLE001 - boundary: an answer of a form that it does not foresee
            return _graded(False, raised=True)
        return _graded(checked["valid"])


class Several:
    """An entry of several turns, whose calls run in simulators of its own."""

    def __init__(self, form: str, entry: dict[str, Any], functions: list[Any], truth: list[Any]) -> None:
        self._form, self._entry, self._truth = form, entry, truth
        self._name = f"{form}-{next(_numbers)}-of"  # of the simulators, which are BFCL's global variables
        self._turns: list[list[list[str]]] = [[]]  # the calls of each step of each turn
        self._cut = False
        self._known = {function["name"] for function in functions}
        self.messages = _opening(form, entry, functions)

    def _run(self, lines: list[str]) -> list[str]:
        self._turns[-1].append(lines)
        entry, long = self._entry, "long_context" in _category(self._entry)
        classes, config = entry["involved_classes"], entry["initial_config"]
        run = simulators.execute_multi_turn_func_call
        results: list[str] = run(lines, config, classes, self._name, entry["id"], long_context=long)[0]
        return results

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a call of a tool."""
        return self._run(handler.convert_to_function_call([{name: arguments}]))[0]

    def step(self, message: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Run the calls of a text, or go to the user's next turn; None: there is none."""
        lines = self._lines(message) if self._form == "text" else []
        if lines and lines != [""]:
            results = self._run(lines)
            self._cut = len(self._turns[-1]) > prompts.MAXIMUM_STEP_LIMIT
            told = handler.format_execution_results_prompting({}, results, {"model_responses_decoded": lines})
            return None if self._cut else [{"role": "user", "content": told}]
        turn = len(self._turns)
        if turn >= len(self._entry["question"]):
            return None
        self._turns.append([])
        later = self._entry.get("missed_function", {}).get(str(turn))
        if later is None:
            return list(self._entry["question"][turn])
        self._known |= {function["name"] for function in later}
        told = prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=later)
        return [{"role": "user", "content": told}]

    def _lines(self, message: dict[str, Any]) -> list[str]:
        """The calls of a text. What is no call of a known function by plain values is replaced by one of none: BFCL
        evaluates what stands here as Python."""
        text = str(message.get("content") or "")
        try:
            _check_sums(text)
            lines = handler.default_decode_execute_prompting(text)
        except Exception:  # noqa: BLE001 - what cannot be decoded is no call
            return []
        return [line if _is_plain(line, self._known) else "no_such_function()" for line in lines]

    def grade(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What the checker says of all turns. A conversation that was cut short is wrong."""
        steps = 0
        for message in messages[len(self.messages) :]:
            steps = steps + 1 if message.get("tool_calls") else steps if message["role"] in ("tool", "assistant") else 0
            self._cut = self._cut or steps > prompts.MAXIMUM_STEP_LIMIT
        if self._cut or len(self._turns) != len(self._truth):
            return _graded(False)
        entry = self._entry
        try:
            checked = multi_turn_checker(self._turns, self._truth, entry, _category(entry), self._name)
        except Exception:  # noqa: BLE001 - boundary: as above
            return _graded(False, raised=True)
        return _graded(checked["valid"])

    def close(self) -> None:
        """Forget its simulators, and those of the checker."""
        held, mine = vars(simulators), re.sub(r"[-./:]", "_", self._name)
        for name in [name for name in list(held) if name.startswith(mine)]:
            del held[name]


def _graded(right: bool, raised: bool = False) -> dict[str, Any]:
    return {"rewards": {"right": float(right)}, "metrics": {"checker_raised": float(raised)}}


def _categories(wanted: list[str] | None, form: str) -> list[str]:
    """The names of categories. Raises ValueError."""
    found: list[str] = []
    for name in wanted if wanted is not None else CATEGORIES:
        inner = [one for one in categories.TEST_COLLECTION_MAPPING.get(name, [name]) if one in CATEGORIES]
        if not inner:
            raise ValueError(f"there is no category {name!r}, or it is not carried; there are {', '.join(CATEGORIES)}")
        if form == "calls" and inner == [LATER] and wanted is not None:
            raise ValueError(f"{LATER} offers functions in the middle of a conversation: it needs `form: text`")
        found += [one for one in inner if one not in found and (form == "text" or one != LATER)]
    return found


def _size(category: str) -> int:
    """How many entries a category has."""
    path = bfcl.PROMPT_PATH / f"{bfcl.VERSION_PREFIX}_{category}.json"
    return sum(bool(line.strip()) for line in path.read_text("utf-8").splitlines())


def _category(entry: Mapping[str, Any]) -> str:
    name: str = bfcl.extract_test_category_from_id(entry["id"])
    return name


def _language(category: str) -> tuple[Language, ReturnFormat]:
    if bfcl.is_java(category):
        return Language.JAVA, ReturnFormat.JAVA
    if bfcl.is_js(category):
        return Language.JAVASCRIPT, ReturnFormat.JAVASCRIPT
    return Language.PYTHON, ReturnFormat.PYTHON


def _opening(form: str, entry: dict[str, Any], functions: list[Any]) -> list[dict[str, Any]]:
    """The messages that a conversation begins with."""
    messages: list[dict[str, Any]] = copy.deepcopy(entry["question"][0])
    if form == "text":
        messages = handler.system_prompt_pre_processing_chat_model(messages, functions, entry["id"])
    return messages


def _decoded(form: str, message: Mapping[str, Any], category: str) -> Any:
    """The calls of an answer, as BFCL decodes them. Raises whatever it raises where there are none."""
    if form == "text":
        text = str(message.get("content") or "")
        shape = ReturnFormat.PYTHON if "relevance" in category else _language(category)[1]
        if shape is ReturnFormat.PYTHON:
            _check_sums(text)
        return handler.default_decode_ast_prompting(text, shape)
    made = message.get("tool_calls")
    if not made:
        raise ValueError("no call")
    functions = [call["function"] for call in made]
    return [{one["name"]: _arguments(one["arguments"])} for one in functions]


def _arguments(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


def _check_sums(text: str) -> None:
    """Raises ValueError where BFCL would evaluate more than a sum of numbers, which a text of calls may hold."""
    cleaned = text.strip("`\n ").strip("'")
    tree = ast.parse(cleaned if cleaned.startswith("[") else f"[{cleaned.rstrip(']')}]", mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            raise ValueError("a lambda")
        if isinstance(node, ast.BinOp):
            inner = [one for one in ast.walk(node) if not isinstance(one, _SUM)]
            if not all(isinstance(one, ast.Constant) and isinstance(one.value, int | float) for one in inner):
                raise ValueError("more than a sum of numbers")


def _is_plain(line: str, known: set[str]) -> bool:
    """Whether a line calls known functions by plain values alone."""
    try:
        tree = ast.parse(line, mode="eval")
    except (SyntaxError, ValueError):
        return False
    nodes = list(ast.walk(tree))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    plain = all(isinstance(node, _LITERAL) for node in nodes) and isinstance(tree.body, ast.Call)
    return plain and all(name in called and name.id in known for name in names) and len(called) == len(names)


# what is stored, as it is said


def _said(form: str, calls: Calls) -> dict[str, Any]:
    """An answer that makes calls."""
    if not calls:
        return {"role": "assistant", "content": "None of these functions can do that."}
    pairs = [pair for call in calls for pair in call.items()]
    if form == "text":
        lines = [f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for name, given in pairs]
        return {"role": "assistant", "content": f"[{', '.join(lines)}]"}
    functions = [{"name": name.replace(".", "_"), "arguments": given} for name, given in pairs]
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": f} for f in functions]}


def _stored_calls(entry: Mapping[str, Any], truth: Sequence[Any], category: str) -> Calls:
    """The first of the values that are right, for each parameter that must be there."""
    calls: Calls = []
    for one in truth:
        ((name, values),) = one.items()
        documented = [function for function in entry["function"] if function["name"] == name] or entry["function"]
        parameters = documented[0]["parameters"]
        needed = {key: allowed for key, allowed in values.items() if "" not in allowed or key in parameters["required"]}
        given = {key: _first([value for value in allowed if value != ""]) for key, allowed in needed.items()}
        if (language := _language(category)[0]) is not Language.PYTHON:
            kinds = {key: schema["type"] for key, schema in parameters["properties"].items()}
            given = {key: _as_code(value, kinds.get(key, ""), language) for key, value in given.items()}
        calls.append({name: given})
    return calls


def _first(allowed: Any) -> Any:
    """The first value of a list of those that are right; of a dictionary, that of each key."""
    value = allowed[0] if allowed else ""
    if isinstance(value, dict):
        return {key: _inner(inner) for key, inner in value.items() if "" not in inner}
    if isinstance(value, list):
        return [_first([one]) if isinstance(one, dict) else one for one in value]
    return value


def _inner(allowed: Any) -> Any:
    return allowed[0] if isinstance(allowed, list) and allowed else allowed


def _as_code(value: Any, kind: str, language: Language) -> str:
    """A value as the text of Java or JavaScript that the converters read, as far as that is simple."""
    java = language is Language.JAVA
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value}{({'long': 'L', 'float': 'f'} if java else {'Bigint': 'n'}).get(kind, '')}"
    if java and isinstance(value, list):
        inner = ", ".join(json.dumps(one) for one in value)
        return f"new ArrayList<>(Arrays.asList({inner}))" if kind == "ArrayList" else f"new Object[]{{{inner}}}"
    return value if isinstance(value, str) else json.dumps(value)


def _keyword_call(line: str, entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A stored call of a simulator, its arguments by name."""
    tree = ast.parse(line, mode="eval").body
    assert isinstance(tree, ast.Call)
    assert isinstance(tree.func, ast.Name)
    later = [function for some in entry.get("missed_function", {}).values() for function in some]
    documented = next(f for f in (*entry["function"], *later) if f["name"] == tree.func.id)
    names = list(documented["parameters"]["properties"])
    given = {name: ast.literal_eval(value) for name, value in zip(names, tree.args, strict=False)}
    return {tree.func.id: {**given, **{str(k.arg): ast.literal_eval(k.value) for k in tree.keywords}}}
