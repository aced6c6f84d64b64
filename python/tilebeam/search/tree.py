"""The tree of steps that a search drew: steps that several texts share are one node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tilebeam.search.contract import Pruned, SearchResult, Trajectory


@dataclass
class StepNode:
    """A step that some texts share, and what follows it.

    Attributes:
        step: its text.
        score: under the reward model, of the chosen candidate where it has the step, else of the first text that has;
            None where nothing rated it.
        children: the steps that follow, those of the chosen candidate first.
        candidates: numbers of the candidates that end here.
        pruned: beams that were dropped here.
        best: whether the chosen candidate goes through it.
    """

    step: str
    score: float | None = None
    children: list[StepNode] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    pruned: list[Pruned] = field(default_factory=list)
    best: bool = False
    known: dict[str, StepNode] = field(default_factory=dict, repr=False)  # the children by their text

    def child(self, step: str) -> StepNode:
        """Return the node of a next step, made where it is new."""
        node = self.known.get(step)
        if node is None:
            node = self.known[step] = StepNode(step)
            self.children.append(node)
        return node


def step_tree(result: SearchResult) -> StepNode:
    """Return the root, whose step is empty, of all steps that were drawn: those of candidates, and those that made
    room for better ones."""
    return _grown(result, lambda _: 0).get(0, StepNode(""))


def step_trees(result: SearchResult) -> dict[int, StepNode]:
    """Return the root of each tree that a search grew (`Trajectory.tree`), by its number, in rising order."""
    return _grown(result, lambda trajectory: trajectory.tree)


def _grown(result: SearchResult, tree_of: Callable[[Trajectory], int]) -> dict[int, StepNode]:
    """Group all roots by what `tree_of` makes of a text. The chosen candidate is walked first, so that
    its nodes come first, and show its scores where texts with the same steps have others."""
    roots: dict[int, StepNode] = {}
    for i in sorted(range(len(result.trajectories)), key=lambda i: i != result.best_index):
        trajectory = result.trajectories[i]
        path = _walk(roots.setdefault(tree_of(trajectory), StepNode("")), trajectory)
        path[-1].candidates.append(i)
        for node in path if i == result.best_index else []:
            node.best = True
    for pruned in result.pruned:
        path = _walk(roots.setdefault(tree_of(pruned), StepNode("")), pruned)
        path[-1].pruned.append(pruned)
    return dict(sorted(roots.items()))


def _walk(root: StepNode, trajectory: Trajectory) -> list[StepNode]:
    """Return the nodes of a text, the root first. A score that a node has is kept."""
    path = [root]
    for i, step in enumerate(trajectory.steps):
        node = path[-1].child(step)
        if node.score is None and trajectory.scores:
            node.score = trajectory.scores[i]
        path.append(node)
    return path
