"""The [data] section: which data to train on."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from thinpipe.launch.data.columns import RowFields


class SourceConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """One source of a mixture: a path as in `data.path`, and its relative share of the samples."""

    path: str = Field(min_length=1)
    weight: float = Field(gt=0)


class DataConfig(RowFields):
    """Which data to train on, as sequences of `sequence_length` tokens.

    `path` is a file, a folder (recursively, without hidden files), a glob, or a data set of the
    hub as `hf:OWNER/NAME[:CONFIG][@REVISION][#SPLIT]`; `sources` are a mixture; without any, the
    text is the source code of Python's standard library. Evaluation data are in `eval_path`, or
    held out from the rest. The content decides the format, unless `format` does. `max_bytes` limits
    how much running text of a source is read, `train_sequences = "all"` takes all of it. With
    `stream_block` rows are a stream, read in one pass and shuffled in blocks of so many. `factory`
    and `eval_factory` ("module:function") return your own datasets, whose items are (input,
    target); without the second, the last `eval_sequences` samples are held out.
    """

    factory: str | None = None
    eval_factory: str | None = None

    path: str | None = Field(default=None, min_length=1)
    eval_path: str | None = Field(default=None, min_length=1)
    sources: tuple[SourceConfig, ...] = ()
    format: Literal["auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"] = "auto"
    sequence_length: int = Field(default=128, ge=1)
    train_sequences: Annotated[int, Field(ge=1)] | Literal["all"] = 512
    eval_sequences: Annotated[int, Field(ge=1)] | Literal["all"] = 64
    tokenizer: str = Field(default="bytes", min_length=1)
    max_bytes: int | None = Field(default=None, ge=1)
    stream_block: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> "DataConfig":
        given = {"path": self.path, "sources": self.sources}
        named = {name: value for name, value in given.items() if value}
        if len(named) > 1:
            listed = ", ".join(f"{name} = {value!r}" for name, value in named.items())
            raise ValueError(f"{listed}: two sources of text; remove one")
        if self.eval_path is not None and not named:
            raise ValueError(f"eval_path = {self.eval_path!r}: nothing to train on; set path")
        if self.max_bytes is not None and self.kind != "text":
            raise ValueError(
                f"max_bytes = {self.max_bytes}: it limits running text; use train_sequences"
            )
        return self

    @model_validator(mode="after")
    def _own_alone(self) -> "DataConfig":
        if self.factory is None:
            if self.eval_factory is not None:
                raise ValueError(
                    f"eval_factory = {self.eval_factory!r}: nothing to train on; set factory"
                )
            return self
        allowed = {"factory", "eval_factory", "eval_sequences", "sequence_length", "stream_block"}
        if self.stream_block is not None:
            allowed.add("train_sequences")
        for name, field in type(self).model_fields.items():
            if name not in allowed and getattr(self, name) != field.default:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: factory = {self.factory!r} returns the "
                    "samples as they are; remove it"
                )
        return self

    @model_validator(mode="after")
    def _stream_fits(self) -> "DataConfig":
        if self.stream_block is None:
            return self
        what = f"stream_block = {self.stream_block}"
        if self.path is None and self.factory is None:
            remedy = "remove sources, and name one" if self.sources else "set"
            raise ValueError(f"{what}: streams need rows of one source; {remedy} path or factory")
        if self.train_sequences != "all":
            raise ValueError(
                f"train_sequences = {self.train_sequences}: a stream is read as far as "
                'train.max_steps asks; set train_sequences = "all"'
            )
        if self.eval_sequences == "all" and not (self.eval_path or self.eval_factory):
            raise ValueError(
                'eval_sequences = "all": the first samples of a stream are held out; give their '
                "number, or set eval_path"
            )
        if self.max_bytes is not None:
            raise ValueError(f"max_bytes = {self.max_bytes}: {what} reads rows; remove it")
        return self

    @property
    def paths(self) -> dict[str, str | None]:
        """What is trained on, by setting; None stands for the standard library."""
        named = {f"data.sources.{at}.path": source.path for at, source in enumerate(self.sources)}
        return {**named} or {"data.path": self.path}

    @property
    def source(self) -> str:
        """Return the setting that chooses the text, as error messages quote it."""
        if self.factory is not None:
            return f"data.factory = {self.factory!r}"
        if self.sources:
            return f"data.sources = {[source.path for source in self.sources]}"
        return f"data.path = {self.path!r}"
