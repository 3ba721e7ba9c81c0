from agentrl.chat.base import ParsedCall, ParsedTurn
from agentrl.rollout.calls import assistant_message


def test_a_call_keeps_the_id_that_the_model_wrote() -> None:
    own = ParsedCall("calculator", {}, "{}", id="functions.calculator:0")
    without = ParsedCall("calculator", {}, "{}")
    message = assistant_message(ParsedTurn("", (own, without)), turn=3)
    assert [call["id"] for call in message["tool_calls"]] == ["functions.calculator:0", "call_3_1"]
