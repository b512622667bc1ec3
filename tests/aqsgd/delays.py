"""Methods that take a random time longer."""

import random
import time
from typing import Any


def delay(owner: Any, *names: str, dice: random.Random, most_s: float) -> None:
    for name in names:
        method = getattr(owner, name)

        def late(*args: Any, method: Any = method) -> Any:
            time.sleep(dice.random() * most_s)
            return method(*args)

        setattr(owner, name, late)
