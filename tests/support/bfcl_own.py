"""BFCL's own verdicts, in an interpreter that has the package: `python bfcl_own.py FILE`.

FILE holds answers as JSON lines, each `{"category", "index", "form", "said"}`. `said` is what BFCL records of a model:
a list of calls by name with JSON arguments, or a text; for several turns a list of such steps a turn. A line `true` or
`false` is printed for each. The data are read anew, and judged by the functions of its evaluation.
"""

import contextlib
import io
import json
import sys
import types
from functools import lru_cache
from pathlib import Path

OWN = {"calls": ("own-calls", True), "text": ("own-text", False)}
known = types.ModuleType("bfcl_eval.constants.model_config")  # the real one imports the client of every provider
known.MODEL_CONFIG_MAPPING = {name: types.SimpleNamespace(underscore_to_dot=dots) for name, dots in OWN.values()}
sys.modules["bfcl_eval.constants.model_config"] = known

from bfcl_eval import utils  # noqa: E402
from bfcl_eval.constants.enums import Language, ReturnFormat  # noqa: E402
from bfcl_eval.eval_checker import eval_runner  # noqa: E402
from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler  # noqa: E402

HANDLERS = {}
for form in OWN:
    HANDLERS[form] = OpenAICompletionsHandler.__new__(OpenAICompletionsHandler)
    HANDLERS[form].is_fc_model = form == "calls"


@lru_cache(maxsize=4)
def data(category):
    """The lines of a category's entries, and its stored answers."""
    entries = utils.load_dataset_entry(category, include_prereq=False, include_language_specific_hint=False)
    truths = [] if "relevance" in category else utils.load_ground_truth_entry(category)
    return list(map(json.dumps, entries)), truths


def verdict(number, category, index, form, said):
    """Whether BFCL counts an answer as right."""
    entries, truths = data(category)
    entry, handler, name = json.loads(entries[index]), HANDLERS[form], OWN[form][0]
    if "relevance" in category:
        return eval_runner._evaluate_single_relevance_entry(handler, entry["id"], said, entry, name, category)["valid"]
    truth = truths[index]["ground_truth"]
    if utils.is_multi_turn(category):
        name = f"{name}-{number}"  # its simulators are global variables of that name
        judge = eval_runner._evaluate_single_multi_turn_entry
        return judge(handler, entry["id"], said, truth, entry, name, category)["valid"]
    kind = "java" if utils.is_java(category) else "javascript" if utils.is_js(category) else "python"
    judge = eval_runner._evaluate_single_ast_entry
    language, shape = Language(kind), ReturnFormat(kind)
    return judge(handler, entry["id"], said, truth, entry, name, category, language=language, return_format=shape)[
        "valid"
    ]


for number, line in enumerate(Path(sys.argv[1]).read_text("utf-8").splitlines()):
    with contextlib.redirect_stdout(io.StringIO()):
        valid = verdict(number, **json.loads(line))
    print(json.dumps(bool(valid)))
