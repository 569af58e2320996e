"""What the tests of frameworks ask for: a small structure, and a tool."""

from pydantic import BaseModel

PROMPT = "In the beginning"
MESSAGES = [{"role": "user", "content": PROMPT}]


class City(BaseModel):
    """A city and the year it was founded."""

    name: str
    year: int
    capital: bool


def weather(place: str, days: int) -> str:
    """Returns the weather of a place.

    Args:
        place: The name of the place.
        days: For how many days.
    """
    assert isinstance(place, str) and isinstance(days, int)
    return "rain"
