"""Define the options of a section of data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class TrainOn(StrEnum):
    """The turns of the assistant that a conversation trains."""

    ALL = "all"
    LAST = "last"


class Truncation(StrEnum):
    """The fate of a row of supervised training that is too long."""

    ERROR = "error"
    DROP = "drop"
    LEFT = "left"  # its first tokens go
    RIGHT = "right"  # its last tokens go
    MIDDLE = "middle"  # its first and last tokens stay, as many of each


@dataclass
class DataConfig:
    """Rows to train on or to evaluate."""

    source: Any = field(
        default="",
        metadata={"takes": "text (a file, pattern, folder or function), or a list [...] of such"},
    )
    """The rows: FILE.jsonl, FILE.json, FILE.parquet, FILE.csv, FILE.tsv, a pattern
    such as 'data/*.parquet', a folder of such files or of datasets, a data set of the
    Hugging Face Hub as ORG/NAME or ORG/NAME@REVISION, a function "pkg.mod:name", or a
    list [...] of files, patterns and folders."""
    split: str = ""
    """The split to take from a folder that has several, such as train."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for a source that is a function."""
    prompt_key: str = "prompt"
    """The field of a row that holds the prompt: text, or a list of {role, content}."""
    answer_key: str = "answer"
    """The field of a row that the reward compares with, or the target text in
    supervised training."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of the source's columns by the names that a run reads: {prompt: question,
    answer: reward_model.ground_truth}. A dot leads into a nested column."""
    sampler: str = ""
    """The class that picks the next row, "pkg.mod:Name" or "file.py:Name"; empty takes
    every row once in each epoch."""
    sampler_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the class of data.sampler."""
    system_prompt: str = ""
    """The first message of every prompt; it needs a chat template."""
    control_tokens: bool = False
    """Let control tokens in the text of the data, such as <|im_start|>, be encoded as
    control tokens; else they are plain characters."""
    max_prompt_tokens: int = field(default=1024, metadata={"ge": 1})
    """The longest prompt that is allowed, in tokens; a longer one is an error, or is
    dropped if drop_overlong is set."""
    drop_overlong: bool = False
    """Leave out rows that are too long, and say how many they are."""
    max_tokens: int = field(default=0, metadata={"ge": 0})
    """The longest row of supervised training, in tokens; 0 takes what model and engine
    have room for."""
    truncation: Truncation = Truncation.ERROR
    """The fate of a row of supervised training that is too long: it is refused (error),
    left out (drop), or loses its first (left), last (right) or middle tokens."""
    train_on: TrainOn = TrainOn.ALL
    """The turns of a conversation that supervised training imitates: those of the
    assistant (all), or its last one (last)."""
    keep_reasoning: bool = True
    """Keep earlier reasoning in a conversation of supervised training also where the
    chat template would drop it; else such a turn is a row of its own."""
    shuffle: bool = True
    """Take the rows in a new order in every epoch."""
    limit: int = field(default=0, metadata={"ge": 0})
    """Use only this many rows from the start of the source; 0 uses all."""

    def __post_init__(self) -> None:
        """Raises ValueError: an option is of another kind, or contradicts another."""
        texts = self.source if isinstance(self.source, list) else [self.source]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"source takes text or a list of texts, got {self.source!r:.80}.")
        if isinstance(self.source, list) and "" in texts:
            raise ValueError(f"source lists an empty text: {self.source!r:.80}.")

        for name, column in self.columns.items():
            if not isinstance(column, str) or not column:
                raise ValueError(
                    f"columns takes names of columns, got {column!r:.80} for {name}.\n"
                    "  write it as:  data.columns.prompt=question"
                )
        for name, key in (("prompt", self.prompt_key), ("answer", self.answer_key)):
            if name in self.columns and key != name:
                raise ValueError(
                    f"{name}_key={key} contradicts columns.{name}={self.columns[name]}: leave one "
                    "of them out."
                )
        if self.drop_overlong and self.truncation not in (Truncation.ERROR, Truncation.DROP):
            raise ValueError(
                f"drop_overlong=true contradicts truncation={self.truncation}: leave one of them "
                "out."
            )

    @property
    def drops(self) -> bool:
        """Return whether rows that are too long are left out."""
        dropped = self.truncation is Truncation.DROP
        return self.drop_overlong or dropped

    @property
    def sources(self) -> list[str]:
        """Return the entries of ``source``, one or several."""
        return list(self.source) if isinstance(self.source, list) else [self.source]

    @property
    def named(self) -> str:
        """Return ``source`` as the command line takes it."""
        return f"[{','.join(self.source)}]" if isinstance(self.source, list) else self.source

    @property
    def prompt_column(self) -> str:
        """Return the name of the column of the source that holds the prompt."""
        return self.columns.get("prompt", self.prompt_key)
