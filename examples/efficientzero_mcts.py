"""Teach EfficientZero tic-tac-toe by self-play, then time its search on torch and on modkit.

    python examples/efficientzero_mcts.py            # two or three minutes on one core
    python examples/efficientzero_mcts.py --quick    # a few seconds: hardly any training

The model sees only the squares, the moves and the results. It searches in its own latent states: only the root
of a search is a real position, and the rules are not used below it. ``modkit.EMA`` is the target network: its
weights play all games, and compute the targets of the latent states. All games are played inside
``modkit.fast_inference``.
"""

import argparse
import contextlib
import copy
import gc
import math
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import modkit
from modkit import nn
from modkit.models import EfficientZeroModel


SQUARES = 9
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
UNROLL = 3  # how many steps of the dynamics are trained from each position
# Values and value prefixes are distributions over these three results.
RESULTS = torch.tensor([-1.0, 0.0, 1.0])
GAME: dict[str, Any] = {
    "observation_shape": (3, 3, 3),
    "action_space_size": SQUARES,
    "reward_support_size": len(RESULTS),
    "value_support_size": len(RESULTS),
}
SMALL: dict[str, Any] = {
    # Batch statistics do not fit the inputs of a search, unless they are gathered for long.
    "norm_type": "LN",
    "num_channels": 16,
    "reward_head_channels": 4,
    "value_head_channels": 4,
    "policy_head_channels": 4,
    "lstm_hidden_size": 32,
    "proj_hid": 64,
    "proj_out": 64,
    "pred_hid": 32,
    "pred_out": 64,
}


Average: TypeAlias = modkit.EMA[EfficientZeroModel]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


# --- the game -------------------------------------------------------------------------------------


class Board:
    """A position: 1 for the player to move, -1 for the other one, 0 for an empty square."""

    def __init__(self) -> None:
        self.squares = [0] * SQUARES

    def moves(self) -> list[int]:
        """Return the empty squares."""
        return [square for square, stone in enumerate(self.squares) if stone == 0]

    def play(self, square: int) -> int | None:
        """Make a move and turn the board; return 1 for a win, 0 for a draw, None to go on."""
        self.squares[square] = 1
        won = any(all(self.squares[i] == 1 for i in line) for line in LINES)
        self.squares = [-stone for stone in self.squares]
        if won:
            return 1
        return None if self.moves() else 0

    def planes(self) -> list[list[float]]:
        """Return the observation: the player's stones, the opponent's, and the empty squares."""
        return [[float(stone == kind) for stone in self.squares] for kind in (1, -1, 0)]


def observations(boards: list[Board]) -> torch.Tensor:
    """Return boards as a batch of observations."""
    return torch.tensor([board.planes() for board in boards]).view(-1, 3, 3, 3)


# --- the search -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Node:
    """A latent state in the tree, or an untried move."""

    prior: float
    visits: int = 0
    total: float = 0.0  # the sum of its values for the player to move
    prefix: float = 0.0  # the rewards from the root to here, for the player at the root
    reward: float = 0.0  # that of the move to here, for the player who made it
    latent: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, torch.Tensor] | None = None
    children: dict[int, "Node"] = field(default_factory=dict)

    def expand(self, output: Any, index: int, priors: list[float], moves: list[int]) -> None:
        """Keep one sample of an inference, and add a child for each move."""
        self.latent = output.latent_state[index : index + 1]
        h, c = output.reward_hidden_state
        self.hidden = h[:, index : index + 1], c[:, index : index + 1]
        total = sum(priors[move] for move in moves)
        self.children = {move: Node(priors[move] / total) for move in moves}

    def best(self) -> tuple[int, "Node"]:
        """Return the child with the highest upper confidence bound."""
        bonus = 1.25 * math.sqrt(self.visits)
        best_move, best_child, best_score = -1, self, -math.inf
        for move, child in self.children.items():
            score = bonus * child.prior / (1 + child.visits)
            if child.visits:
                score += child.reward - child.total / child.visits
            if score > best_score:
                best_move, best_child, best_score = move, child, score
        return best_move, best_child


def search(model: Any, boards: list[Board], simulations: int, noise: float = 0.0) -> list[Node]:
    """Search all boards at once, each in its own tree; return the roots."""
    output = model.initial_inference(observations(boards))
    priors = output.policy_logits.softmax(1).tolist()
    roots = [Node(1.0) for _ in boards]
    for index, (root, board) in enumerate(zip(roots, boards, strict=True)):
        root.expand(output, index, priors[index], board.moves())
        if noise:
            add_noise(root, noise)
    every_move = list(range(SQUARES))
    for _ in range(simulations):
        paths = [descend(root) for root in roots]
        output = step(model, paths)
        priors = output.policy_logits.softmax(1).tolist()
        values = (output.value.softmax(1) @ RESULTS).tolist()
        prefixes = (output.value_prefix.softmax(1) @ RESULTS).tolist()
        for index, path in enumerate(paths):
            leaf, parent = path[-1][1], path[-2][1]
            leaf.expand(output, index, priors[index], every_move)
            leaf.prefix = prefixes[index]
            sign = 1 if len(path) % 2 == 0 else -1
            leaf.reward = sign * (leaf.prefix - parent.prefix)
            back_up(path, values[index])
    return roots


def step(model: Any, paths: list[list[tuple[int, Node]]]) -> Any:
    """Run the model for the last step of each path."""
    parents = [path[-2][1] for path in paths]
    actions = torch.tensor([path[-1][0] for path in paths])
    if len(parents) == 1:
        return model.recurrent_inference(parents[0].latent, parents[0].hidden, actions)
    states: Any = [(parent.latent, *(parent.hidden or ())) for parent in parents]
    latents, h, c = zip(*states, strict=True)
    return model.recurrent_inference(
        torch.cat(latents), (torch.cat(h, 1), torch.cat(c, 1)), actions
    )


def descend(root: Node) -> list[tuple[int, Node]]:
    """Return the path from the root to an untried move: its moves and nodes."""
    path = [(-1, root)]
    node = root
    while node.latent is not None:
        move, node = node.best()
        path.append((move, node))
    return path


def back_up(path: list[tuple[int, Node]], value: float) -> None:
    """Back up the value at the end of a path to all of its nodes; players alternate."""
    for _, node in reversed(path):
        node.total += value
        node.visits += 1
        value = node.reward - value


def add_noise(root: Node, share: float) -> None:
    """Add noise to the priors of the root, so that self-play explores."""
    draws = [random.gammavariate(0.8, 1) for _ in root.children]
    for child, draw in zip(root.children.values(), draws, strict=True):
        child.prior = (1 - share) * child.prior + share * draw / sum(draws)


def visits(root: Node) -> list[float]:
    """Return the share of each move in the visits of a root."""
    total = sum(child.visits for child in root.children.values())
    return [root.children[m].visits / total if m in root.children else 0.0 for m in range(SQUARES)]


def most_visited(root: Node) -> int:
    """Return the most visited move of a search."""
    return max(root.children, key=lambda move: root.children[move].visits)


# --- self-play and training -----------------------------------------------------------------------


@dataclass
class Game:
    """A finished game: positions, moves, search results, and the outcome."""

    planes: list[list[list[float]]] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    policies: list[list[float]] = field(default_factory=list)
    reward: int = 0  # that of the last move: 1 if it has won


def self_play(model: Any, count: int, simulations: int) -> list[Game]:
    """Play games of the model against itself, all at once."""
    games = [Game() for _ in range(count)]
    running = [(game, Board()) for game in games]
    while running:
        roots = search(model, [board for _, board in running], simulations, noise=0.25)
        still: list[tuple[Game, Board]] = []
        for (game, board), root in zip(running, roots, strict=True):
            policy = visits(root)
            # The first moves are drawn, so that games differ; later ones are the best.
            early = len(game.moves) < 4
            move = random.choices(range(SQUARES), policy)[0] if early else most_visited(root)
            game.planes.append(board.planes())
            game.moves.append(move)
            game.policies.append(policy)
            result = board.play(move)
            if result is None:
                still.append((game, board))
            game.reward = result or 0
        running = still
    return games


def targets(game: Game, start: int) -> dict[str, Any]:
    """Return the training targets from one position on, padded past the end of the game."""
    length = len(game.moves)
    rows: dict[str, list[Any]] = {
        "planes": [],
        "moves": [],
        "policy": [],
        "value": [],
        "prefix": [],
    }
    for time_step in range(start, start + UNROLL + 1):
        over = time_step >= length
        rows["planes"].append(game.planes[start] if over else game.planes[time_step])
        rows["moves"].append(random.randrange(SQUARES) if over else game.moves[time_step])
        # After the end there is no policy to learn; the value is 0, as the reward has been given.
        rows["policy"].append([0.0] * SQUARES if over else game.policies[time_step])
        mover_wins = (length - 1 - time_step) % 2 == 0
        rows["value"].append(0 if over else game.reward * (1 if mover_wins else -1))
        starter_wins = (length - 1 - start) % 2 == 0
        done = time_step >= length - 1
        rows["prefix"].append(game.reward * (1 if starter_wins else -1) if done else 0)
    return rows


def make_batch(games: deque[Game], size: int) -> dict[str, torch.Tensor]:
    """Draw positions from the games; results become the index of their class."""
    chosen = random.choices(games, k=size)
    rows = [targets(game, random.randrange(len(game.moves))) for game in chosen]
    batch = {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}
    batch["planes"] = batch["planes"].view(size, UNROLL + 1, 3, 3, 3)
    batch["value"], batch["prefix"] = batch["value"] + 1, batch["prefix"] + 1
    return batch


def loss_of(
    model: EfficientZeroModel, ema: Average, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Unroll the model from real positions, and compare each step with its targets."""
    planes, policies = batch["planes"], batch["policy"]
    with ema.applied(), torch.no_grad():
        model.eval()
        later = planes[:, 1:].flatten(0, 1)
        goals = model.project(model.initial_inference(later).latent_state, with_grad=False)
        goals = goals.view(len(planes), UNROLL, -1)
    model.train()
    output = model.initial_inference(planes[:, 0])
    loss = torch.zeros(())
    for k in range(UNROLL + 1):
        loss = loss - (policies[:, k] * output.policy_logits.log_softmax(1)).sum(1).mean()
        loss = loss + nn.functional.cross_entropy(output.value, batch["value"][:, k])
        if k == UNROLL:
            break
        latent = output.latent_state
        if latent.requires_grad:
            latent.register_hook(lambda gradient: gradient * 0.5)
        output = model.recurrent_inference(latent, output.reward_hidden_state, batch["moves"][:, k])
        prefix = torch.as_tensor(output.value_prefix)
        loss = loss + nn.functional.cross_entropy(prefix, batch["prefix"][:, k])
        likeness = nn.functional.cosine_similarity(model.project(output.latent_state), goals[:, k])
        # Positions after the end do not exist.
        loss = loss - (likeness * policies[:, k + 1].sum(1)).mean()
    return loss / (UNROLL + 1)


@contextlib.contextmanager
def playing(model: EfficientZeroModel, ema: Average) -> Iterator[None]:
    """Swap in the averaged weights and turn gradients off, for playing."""
    model.eval()
    with ema.applied(), modkit.fast_inference(model), torch.inference_mode():
        yield


def train(
    model: EfficientZeroModel, ema: Average, options: argparse.Namespace, console: Console
) -> None:
    """Alternate between self-play and training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.rounds)
    games: deque[Game] = deque(maxlen=1000)
    with playing(model, ema):
        # Few simulations: varied games teach the value of winning best.
        games.extend(self_play(model, 8 * options.parallel, 2))
    for _ in track(range(options.rounds), "training", console=console, transient=True):
        with playing(model, ema):
            games.extend(self_play(model, options.parallel, options.simulations))
        for _ in range(options.steps):
            loss = loss_of(model, ema, make_batch(games, 128))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            ema.update()
        schedule.step()


# --- strength -------------------------------------------------------------------------------------


def against_random(model: nn.Module, games: int, simulations: int) -> Counter[str]:
    """Play a batch of games against random moves, half of them as the first player."""
    results: Counter[str] = Counter()
    boards = [(Board(), index % 2 == 0) for index in range(games)]
    while boards:
        mine = [board for board, my_turn in boards if my_turn]
        roots = iter(search(model, mine, simulations) if mine else [])
        still: list[tuple[Board, bool]] = []
        for board, my_turn in boards:
            move = most_visited(next(roots)) if my_turn else random.choice(board.moves())
            result = board.play(move)
            if result is None:
                still.append((board, not my_turn))
            else:
                results["draw" if result == 0 else "win" if my_turn else "loss"] += 1
        boards = still
    return results


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share, after Wilson."""
    z = statistics.NormalDist().inv_cdf(0.975)
    share = successes / trials
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    spread /= 1 + z**2 / trials
    return max(0.0, middle - spread), min(1.0, middle + spread)


def strength_table(players: dict[str, Counter[str]]) -> Table:
    """Show each player's results, with confidence intervals for the shares of wins and losses."""
    table = Table(title="Against random moves", title_justify="left")
    table.add_column("model")
    for heading in ("games", "won", "drawn", "lost", "won (95 %)", "lost (95 %)"):
        table.add_column(heading, justify="right")
    for name, results in players.items():
        games = results.total()
        shares = []
        for outcome in ("win", "loss"):
            low, high = wilson(results[outcome], games)
            shares.append(f"{results[outcome] / games:.1%} ({low:.1%} to {high:.1%})")
        counts = (f"{number}" for number in (games, *map(results.get, ("win", "draw", "loss"))))
        table.add_row(name, *(count.replace("None", "0") for count in counts), *shares)
    return table


def seconds_of(play: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    play()
    return time.process_time() - start


def speeds(model: nn.Module, simulations: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Time interleaved searches of one position; return nodes per second, and the ratio to eager calls.

    A node is one call of ``recurrent_inference`` at batch 1, with the work of the tree around it.
    """
    fast = copy.deepcopy(model)
    players = {"eager": model, "eager, fast_inference": fast}
    for player in players.values():
        player.eval()
    times: dict[str, list[float]] = {name: [] for name in players}
    gc.collect()
    with modkit.fast_inference(fast), torch.inference_mode():
        for _ in range(1 + rounds):  # the first round is to warm up
            for name, player in players.items():
                times[name].append(seconds_of(partial(search, player, [Board()], simulations)))
    base = times["eager"][1:]
    return {
        name: (
            simulations / statistics.median(found[1:]),
            statistics.median(one / other for one, other in zip(base, found[1:], strict=True)),
        )
        for name, found in times.items()
    }


def speed_table(found: dict[str, dict[str, tuple[float, float]]]) -> Table:
    """Show nodes a second for each size of the model."""
    table = Table(title="Search, one node at a time", title_justify="left")
    table.add_column("calls")
    for size in found:
        table.add_column(f"{size}: nodes/s", justify="right")
        table.add_column("times eager", justify="right")
    for name in next(iter(found.values())):
        cells = [(f"{rows[name][0]:,.0f}", f"{rows[name][1]:.2f}") for rows in found.values()]
        table.add_row(name, *(cell for pair in cells for cell in pair))
    return table


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="hardly any training, few games")
    parser.add_argument("--rounds", type=int, help="turns of self-play and training")
    parser.add_argument("--games", type=int, help="games against random moves")
    parser.add_argument("--simulations", type=int, default=24, help="nodes of each search")
    parser.add_argument("--seed", type=int, default=0, help="of weights and moves")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 30)
    options.games = options.games or (10 if options.quick else 200)
    options.parallel, options.steps = (8, 2) if options.quick else (32, 32)
    options.timed = 2 if options.quick else 40
    for name in ("rounds", "games", "simulations"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name}: {getattr(options, name)} is less than 1")
    return options


def main() -> None:
    """Train, play against random moves, and time the search."""
    options = parse()
    # The tensors are small: a second thread costs more than it saves.
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    console = Console()
    model = EfficientZeroModel(**GAME, **SMALL)
    ema = modkit.EMA(model, decay=0.97, buffers="average")
    ema.update()

    players = {}
    with playing(model, ema):
        players["untrained"] = against_random(model, options.games, options.simulations)
    start = time.monotonic()
    train(model, ema, options, console)
    console.print(f"Trained for {time.monotonic() - start:.0f} s.")
    with playing(model, ema):
        players["trained"] = against_random(model, options.games, options.simulations)
    console.print(strength_table(players))

    # The second one has the default widths of LightZero's model.
    sizes = {"16 channels": model, "64 channels": EfficientZeroModel(**GAME)}
    nodes = 50
    console.print(speed_table({n: speeds(m, nodes, options.timed) for n, m in sizes.items()}))


if __name__ == "__main__":
    main()
