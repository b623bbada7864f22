"""``always`` hands every prompt over; ``never`` none, so that decode workers do all of it."""

from kvyard.router.deciders import Decider, SplitInput


class Always(Decider):
    looks = False

    def splits(self, split: SplitInput | None) -> bool:
        return True


class Never(Decider):
    looks = False

    def splits(self, split: SplitInput | None) -> bool:
        return False
