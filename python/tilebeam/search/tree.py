"""The tree of steps that a search drew: steps that several texts share are one node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tilebeam.search.base import Pruned, SearchResult, Trajectory


@dataclass
class StepNode:
    """A step that some texts share, and what follows it.

    Attributes:
        step: its text.
        score: under the reward model; None where nothing rated it.
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
        """The node of a next step, made where it is new."""
        node = self.known.get(step)
        if node is None:
            node = self.known[step] = StepNode(step)
            self.children.append(node)
        return node


def step_tree(result: SearchResult, tree: int | None = None) -> StepNode:
    """The root, whose step is empty, of all steps that were drawn: those of candidates, and those that made room for
    better ones.

    Args:
        result: of the search.
        tree: the steps of this tree only (see `Trajectory.tree`); None: of all.
    """
    root = StepNode("")
    for i, trajectory in enumerate(result.trajectories):
        if tree is None or trajectory.tree == tree:
            path = list(_walk(root, trajectory))
            path[-1].candidates.append(i)
            for node in path if i == result.best_index else []:
                node.best = True
    for pruned in result.pruned:
        if tree is None or pruned.tree == tree:
            *_, last = _walk(root, pruned)
            last.pruned.append(pruned)
    _order([root])
    return root


def _walk(root: StepNode, trajectory: Trajectory) -> Iterator[StepNode]:
    node = root
    yield node
    for i, step in enumerate(trajectory.steps):
        node = node.child(step)
        node.score = trajectory.scores[i] if trajectory.scores else None
        yield node


def _order(nodes: Iterable[StepNode]) -> None:
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        node.children.sort(key=lambda child: not child.best)
        waiting += node.children
