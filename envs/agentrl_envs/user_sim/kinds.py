"""What customers want: which facts each wish needs, and the form of its final line."""

from dataclasses import dataclass

from agentrl_envs.user_sim.facts import (
    ACCOUNT,
    ADDRESS,
    AMOUNT,
    CARD,
    COLOUR,
    DAY,
    NAME,
    NIGHTS,
    ORDER,
    PEOPLE,
    ROOM,
    SIZE,
    TIME,
    Fact,
)


@dataclass(frozen=True)
class Kind:
    """One wish.

    form: the final line, `{name}` standing for a fact's value and `{found}` for what `lookup` says of it.
    openings, other_openings: how it is said, in training and in the held-out wordings.
    """

    name: str
    facts: tuple[Fact, ...]
    form: str
    openings: tuple[str, ...]
    other_openings: tuple[str, ...]

    @property
    def looks_up(self) -> bool:
        """Whether a number's record must be looked up for the answer."""
        return "{found}" in self.form

    @property
    def shown_form(self) -> str:
        """The form as the assistant is told it."""
        names = {fact.name: f"<{fact.name}>" for fact in self.facts}
        return f"#### {self.form.format(**names, found='<number found>')}"


KINDS = (
    Kind(
        "cancel", (ORDER,), "cancel {order}",
        ("Please cancel my order.", "I want to cancel an order.", "Can you cancel my order?"),
        ("I no longer want what I bought, so cancel it.", "Stop my order, it is not needed any more."),
    ),
    Kind(
        "resize", (ORDER, SIZE), "size {order} {size}",
        ("Please change the size of my order.", "My order has the wrong size.", "Can I have another size?"),
        ("What I bought does not fit, I need to swap it.", "The size I took is no good, do change it."),
    ),
    Kind(
        "recolour", (ORDER, COLOUR), "colour {order} {colour}",
        ("Please change the colour of my order.", "My order has the wrong colour.", "Can I have another colour?"),
        ("I took the wrong colour by mistake, do swap it.", "The colour that I bought does not suit me."),
    ),
    Kind(
        "deliver", (ORDER, DAY), "deliver {order} {day}",
        ("Please bring my order on another day.", "I am away, deliver my order later.", "Can you move my delivery?"),
        ("Nobody is at home when you come, make it another day.", "The delivery must be put off."),
    ),
    Kind(
        "address", (ORDER, ADDRESS), "address {order} {address}",
        ("Please send my order elsewhere.", "I have moved, change the address.", "Can my order go elsewhere?"),
        ("We live in a new house now, so do bring it there.", "The parcel must not come to my old place."),
    ),
    Kind(
        "table", (DAY, TIME, PEOPLE), "table {day} {time} {people}",
        ("Please book a table.", "I want a table for dinner.", "Can we have a table?"),
        ("We would love to eat at your place.", "Do keep a table for us, will you?"),
    ),
    Kind(
        "room", (NAME, NIGHTS, ROOM), "room {name} {nights} {room}",
        ("Please book a room.", "I need a room.", "Can I have a room?"),
        ("I am looking for a place to sleep.", "Do you still have a bed for me?"),
    ),
    Kind(
        "haircut", (NAME, DAY, TIME), "haircut {name} {day} {time}",
        ("Please book a haircut.", "I need a haircut.", "Can I come for a haircut?"),
        ("My hair is far too long.", "When could you cut my hair? I have a wish."),
    ),
    Kind(
        "taxi", (ADDRESS, TIME), "taxi {address} {time}",
        ("Please send a taxi.", "I need a taxi.", "Can I have a taxi?"),
        ("I have a plane to catch, somebody must drive me.", "A cab for me, if you would."),
    ),
    Kind(
        "transfer", (AMOUNT, ACCOUNT), "transfer {amount} {account}",
        ("Please transfer money.", "I want to send money.", "Can you make a transfer?"),
        ("I owe somebody some money and will pay it now.", "A payment has to leave today."),
    ),
    Kind(
        "price", (ORDER,), "{found}",
        ("What did my order cost?", "I want to know the price of my order.", "How much was my order?"),
        ("I forgot what I paid you the last time.", "Can you tell me how expensive my shopping was?"),
    ),
    Kind(
        "points", (CARD,), "{found}",
        ("How many points do I have?", "I want to know my points.", "Can you tell me my points?"),
        ("Did I collect enough points for a gift?", "I wonder what my loyalty brought me."),
    ),
)  # fmt: skip
