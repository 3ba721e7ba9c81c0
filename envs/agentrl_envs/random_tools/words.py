"""Words and values that random tools are made of: real ones, and invented ones for as many more.

Every third real word is kept for the split `test`, so that its tools have no name in common with those of the lessons.
"""

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from zlib import crc32


def _each(words: str) -> list[str]:
    return words.split()


NOUNS = _each(
    """
    lamp valve boat camera garden parcel ticket robot engine bridge tunnel bottle shipment invoice student teacher
    patient recipe song movie album planet star satellite river lake mountain trail hotel room flight train bus
    station museum painting statue castle village farm tractor goat horse bird fish whale coral tree flower seed crop
    orchid machine printer server router cable sensor battery panel turbine pump filter tank pipe boiler furnace oven
    freezer crate pallet warehouse truck driver pilot captain crew team player match league trophy medal coach gym
    lesson course exam grade diploma project task ticket meeting agenda report memo contract policy claim loan account
    budget wallet coin token badge key lock gate door window roof wall tile brick beam sample probe cell gene enzyme
    reactor crystal magnet lens mirror telescope rocket drone package letter stamp postcard mailbox
    """
)
VERBS = _each(
    """
    open close move send assign start stop add remove set update schedule reserve lock unlock paint charge repair load
    unload register approve reject submit publish archive restore rename copy merge split attach detach ship deliver
    collect inspect calibrate reset enable disable mount launch land park refuel clean drain fill heat cool freeze mix
    stir press fold label seal sign print scan upload download install deploy test tune water plant harvest feed train
    grade enroll transfer pay bill refund invite call notify mark tag rate raise lower turn switch book
    """
)
GETTERS = _each(
    """
    get show read look_up fetch describe inspect query tell view check list_details info_of details_of
    """
)
FINDERS = _each("find search locate match lookup seek identify trace pick_out resolve")
ATTRIBUTES = _each(
    """
    color weight height width depth length owner city country rating level speed power age score temperature pressure
    floor capacity volume duration distance mass brand model material shape pattern flavor origin language currency
    salary rank priority category genre year mileage voltage frequency humidity salinity density altitude latitude
    population area budget revenue profit manager supplier driver pilot captain coach doctor nurse mood texture grade
    balance size phase status_code zone lane slot batch warranty deadline
    """
)
ARGUMENTS = _each(
    """
    count degrees percent minutes hours days times repeat limit offset strength brightness volume target destination
    recipient sender location place room zone day date hour start end reason note message comment label tag color mode
    priority level speed channel format language currency unit_name side direction method driver team partner channel
    contact email phone address rate factor base width height depth weight angle radius tempo pitch deposit discount
    budget seats guests rows pages copies_made
    """
)
FLAGS = [
    "urgent",
    "silent",
    "archived",
    "verbose",
    "express",
    "fragile",
    "insured",
    "public",
    "shared",
    "locked",
    "recursive",
    "gift",
    "premium",
    "remote",
]
CHOICES = _each(
    """
    red green blue white black gold silver small medium large low high slow fast left right north south east west up
    down day night summer winter soft hard hot cold wet dry short long early late full half single double open closed
    manual auto daily weekly monthly yearly metric imperial plain fancy dark light sweet sour
    """
)
ADJECTIVES = _each(
    """
    red green blue old new tiny huge quiet loud round square smooth rough bright dark heavy light wooden broken shiny
    dusty narrow wide frozen warm gentle wild lonely happy hollow crooked striped lazy brave early winter summer
    northern southern eastern western upper lower inner outer first second third royal simple double
    """
)
THINGS = _each(
    """
    box fork spoon plate cup chair desk candle rope tent drum flute piano guitar ball kite boot glove scarf hat coat
    ring necklace clock radio phone tablet screen pen pencil paper poster carpet pillow sofa shovel rake hose saw
    drill wrench bolt nut screw nail wire brush comb soap towel bag purse trunk barrel wheel pedal saddle helmet
    whistle puzzle lantern compass anchor sail oar paddle net hook bell fan stove pan pot jar lid
    """
)
FIRST_NAMES = _each(
    """
    Mira Tomas Lena Oscar Nadia Felix Ines Hugo Clara Ivan Sofia Marco Elena Pavel Anna Jonas Maya Leo Nora Emil Rosa
    Karl Vera Simon Alba Peter Lucia Daniel Eva Martin Greta Adam Julia Viktor Sara Paul Irene Max Ada Omar Zoe Amir
    Tara Finn
    """
)
LAST_NAMES = _each(
    """
    Dolan Keller Moss Vargas Lind Becker Costa Marsh Ivanov Duarte Frost Nolan Weber Silva Brandt Reyes Holt Fischer
    Romano Kovac Berg Santos Wolf Medina Larsen Cruz Huber Stone Castro Nagy Wood Ferrari Hill Mendez Voss Rivera Lang
    Ortega
    """
)
PLACES = _each(
    """
    Lisbon Oslo Vienna Porto Madrid Dublin Athens Geneva Prague Warsaw Helsinki Milan Turin Lyon Bergen Malmo Cairo
    Lima Quito Bogota Nairobi Delhi Osaka Kyoto Seoul Hanoi Perth Denver Boston Dallas Austin Portland
    """
)
MONTHS = _each("January February March April May June July August September October November December")
WEEKDAYS = _each("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

ONSETS = _each("b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gr kl pl pr sh sk sl sp st th tr")
VOWELS = _each("a e i o u ai ea ee io oo ou")
ENDINGS = ["", "", "", "l", "n", "r", "s", "t", "m", "x", "nd", "rk", "st", "ck", "ng", "ll"]
INVENTED = (0.2, 0.6, 1.0)  # shares of words that no list holds, one of which each world has
UNKNOWN = 0.35  # that of values
SHORT = 0.7  # that of a few letters, where a lesson asks for such

NAMING = (NOUNS, VERBS, GETTERS, FINDERS, ATTRIBUTES, ARGUMENTS, FLAGS, CHOICES, ADJECTIVES)
"""Lists whose words name tools and arguments, and choices."""
HELD_OUT = 3
"""Every third word of a list is kept for the split `test`, unless another list gives it to the lessons."""
INVENTED_HELD_OUT = 4
"""Every fourth of the words that no list holds is, too. Nothing else sets them apart: endings of their own, say, would
stand in all tools of a task, and be what is hard about it."""
REAL = frozenset(word for words in NAMING for word in words)
TAUGHT = frozenset(word for words in NAMING for i, word in enumerate(words) if i % HELD_OUT)


_COMMON = _each(
    """
    a an the this that these those my your our their his her its some any each all no one two other another same such
    and or but so if then than as at by for from in into of off on out over to up with about after before between under
    until during without again also always already now today here there still just only very too well please thanks
    can could will would should may might must do does did is are was were be been has have had i you we he she they it
    me us him them who what which when where why how much many more most want like need get give go make take put see
    know think tell ask say let use come work seem feel try leave keep begin help show hear play run believe bring
    happen write sit stand lose meet learn change lead understand watch follow speak read spend grow win teach offer
    remember consider appear buy wait serve die expect build stay fall cut reach kill remain suggest good new first last
    long great little own right big high different small large next early young important few bad able time year people
    way day man thing woman life child world hand part place case week company problem fact
    """
)
COMMON = [word for word in _COMMON if word not in REAL and word not in THINGS]
"""The words that English uses most: what stands between those that matter."""


@cache
def _own(number: int, held_out: bool) -> list[str]:
    """The words of one side of a list."""
    taught = [word for i, word in enumerate(NAMING[number]) if i % HELD_OUT]
    return [word for word in NAMING[number][::HELD_OUT] if word not in TAUGHT] if held_out else taught


@cache
def _followers() -> dict[str, str]:
    """By every two letters of the real words, the letters that follow them there; a space begins and ends a word."""
    found: dict[str, str] = {}
    for real in sorted({word for words in (*NAMING, THINGS) for word in words if "_" not in word}):
        text = f"  {real} "
        for i in range(len(real) + 1):
            found[text[i : i + 2]] = found.get(text[i : i + 2], "") + text[i + 2]
    return found


def _piece(rng: Random) -> str:
    word = rng.choice(rng.choice((*NAMING, THINGS)))
    start = rng.randrange(len(word))
    return word[start : start + rng.randint(1, 6)].strip("_").replace("_", "")


def invented(rng: Random) -> str:
    """A word that nobody knows: of syllables, of pieces of real words, of letters that follow each other in English, or
    of any letters."""
    form = rng.random()
    if form < 0.25:
        syllables = rng.choices((1, 2, 3), (2, 5, 1))[0]
        made = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables)) + rng.choice(ENDINGS)
    elif form < 0.6:
        made = "".join(_piece(rng) for _ in range(rng.choices((1, 2, 3), (3, 4, 2))[0]))
    elif form < 0.8:
        made, followers = "  ", _followers()
        while len(made) < 12 and (letter := rng.choice(followers[made[-2:]])) != " ":
            made += letter
        made = made.strip()
    else:
        made = "".join(rng.choice("abcdefghijklmnopqrstuvwxyzaeiou") for _ in range(rng.randint(2, 7)))
    return invented(rng) if made in REAL or not made else made


def _short(rng: Random) -> str:
    made = _piece(rng)[:4]
    return _short(rng) if made in REAL or len(made) < 2 else made


class Words:
    """Draws words of one side: those of the lessons, or those that are held out."""

    def __init__(self, rng: Random, held_out: bool) -> None:
        self.rng, self.held_out = rng, held_out
        self.invented = rng.choice(INVENTED)

    def of(self, words: Sequence[str], used: set[str] | None = None) -> str:
        """A word of a list's own side, or an invented one; not one of `used`, to which it is added."""
        own = _own(next(i for i, known in enumerate(NAMING) if known is words), self.held_out)
        for _ in range(50):
            word = self._invented(invented) if self.rng.random() < self.invented else self.rng.choice(own)
            if used is None or word not in used:
                break
        if used is not None:
            used.add(word)
        return word

    def short(self, words: Sequence[str], used: set[str] | None = None) -> str:
        """A word as `of` gives it, most often an invented one of a few letters."""
        if self.rng.random() >= SHORT:
            return self.of(words, used)
        word = self._invented(_short)
        if used is not None:
            if word in used:
                return self.of(words, used)
            used.add(word)
        return word

    def _invented(self, make: Callable[[Random], str]) -> str:
        """A word that nobody knows, of this side: a checksum of its letters tells the sides apart."""
        while (crc32((word := make(self.rng)).encode()) % INVENTED_HELD_OUT == 0) != self.held_out:
            pass
        return word


def code(rng: Random) -> str:
    """An identifier such as KX-204, t51 or 8832."""
    letters = "".join(rng.choices("ABCDEFGHJKLMNPRSTUVWXYZ", k=rng.randint(1, 3)))
    digits = "".join(rng.choices("0123456789", k=rng.randint(2, 5)))
    form = rng.randrange(6)
    if form == 0:
        return digits.lstrip("0") or "7"
    if form == 1:
        return f"{letters}-{digits}"
    if form == 2:
        return f"{letters.lower()}{digits}"
    if form == 3:
        return f"{letters}_{digits}"
    return f"{letters}{digits}"


def person(rng: Random) -> str:
    """A name, of one word or two, known or invented."""
    first = invented(rng).title() if rng.random() < UNKNOWN else rng.choice(FIRST_NAMES)
    last = invented(rng).title() if rng.random() < UNKNOWN else rng.choice(LAST_NAMES)
    return first if rng.random() < 0.3 else f"{first} {last}"


def place(rng: Random) -> str:
    """A town."""
    return invented(rng).title() if rng.random() < UNKNOWN else rng.choice(PLACES)


def phrase(rng: Random) -> str:
    """A thing of two or three words, such as `dusty lantern`."""
    thing = invented(rng) if rng.random() < UNKNOWN else rng.choice(THINGS)
    adjective = invented(rng) if rng.random() < UNKNOWN else rng.choice(ADJECTIVES)
    return f"{adjective} {rng.choice(THINGS)} {thing}" if rng.random() < 0.15 else f"{adjective} {thing}"


def headline(rng: Random) -> str:
    """A title: capitalized words."""
    words = [rng.choice((phrase(rng), invented(rng), place(rng))) for _ in range(rng.randint(1, 2))]
    text = " ".join(words).title()
    return f"{rng.choice(('The', 'A', 'My', 'Some', 'No'))} {text}" if rng.random() < 0.5 else text


def word(rng: Random) -> str:
    """A single plain word."""
    lists = (CHOICES, THINGS, NOUNS, VERBS, ATTRIBUTES, ARGUMENTS)
    return invented(rng) if rng.random() < 0.5 else rng.choice(rng.choice(lists)).replace("_", " ")


def whole(rng: Random) -> int:
    """A whole number, small ones more often."""
    return rng.choice((rng.randint(0, 12), rng.randint(1, 99), rng.randint(10, 999), rng.randint(100, 9999)))


def decimal(rng: Random) -> float:
    """A number with one or two decimals."""
    return round(rng.uniform(0, rng.choice((10, 100, 1000))), rng.choice((1, 2)))


def date(rng: Random) -> str:
    """A day, in one of four forms."""
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(2019, 2039)
    forms = (f"{year}-{month:02}-{day:02}", f"{day} {MONTHS[month - 1]}", f"{day}.{month}", rng.choice(WEEKDAYS))
    return rng.choice(forms)


def address(rng: Random) -> str:
    """An e-mail address."""
    return f"{invented(rng)}@{invented(rng)}.{rng.choice(('com', 'org', 'net'))}"


Maker = Callable[[Random], "str | int | float"]
KEYS: Sequence[Maker] = (code, code, person, phrase, phrase, headline, word, place)
"""What names an entity."""
RESULTS: Sequence[Maker] = (whole, whole, decimal, code, word, person, place, date)
"""What an attribute holds."""
TEXTS: Sequence[Maker] = (word, word, person, place, date, code, phrase, address, headline)
"""What a text argument holds."""
