"""Counts the places of requests that run or wait, so that a full server answers at once."""

from __future__ import annotations

from .errors import ApiError


class Places:
    """Places for requests.

    Attributes:
      count: number of places.
      taken: places that are taken.
    """

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0

    def take(self, count: int = 1, held: int = 0) -> None:
        """Takes places, beside `held` ones of the same request.

        Raises ApiError: 429 if fewer are free, 400 if there are fewer at all.
        """
        if held + count > self.count:
            problem = f"{held + count} answers at once are more than the {self.count} places"
            raise ApiError(400, problem)
        if self.taken + count > self.count:
            message = f"all {self.count} places are taken; try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        self.taken += count

    def give_back(self, count: int) -> None:
        self.taken -= count
