"""Estimate: the work of a request, before anybody has done it.

Prompt tokens come from bytes by a line learned per model from what the engine reports (tokens = overhead +
slope x bytes; the overhead is the chat template). Output tokens are a conservative quantile of what requests
of the same class and model produced, never more than the request allows itself. Nothing here decides.
"""

from typing import Final

from sluicegate_core.learn import FittedLine, Quantiles
from sluicegate_core.request import OUTPUT_TOKEN_COST, Request

#: Tokens a byte before the model has reported any: between English (0.22 to 0.25) and JSON, Russian or Chinese
#: (up to 0.4), so that an unknown text is rather thought too long than too short.
UNLEARNED_TOKENS_A_BYTE: Final = 0.3
#: Output tokens of a request that states no bound, before its class has produced any.
UNLEARNED_OUTPUT_TOKENS: Final = 256
#: Quantile of output lengths that a request is taken for.
OUTPUT_QUANTILE: Final = 0.8
#: Samples that the estimators remember.
MEMORY: Final = 256
#: Models, and pairs of class and model, learned apart; later ones share one record.
MAX_MODELS: Final = 64
MAX_OUTPUT_RECORDS: Final = 256
#: No estimate goes past this: a token count that a client declares is not evidence.
MAX_TOKENS: Final = 10_000_000


class Estimator:
    """Learns lengths and applies them. Owned by the `Controller`."""

    __slots__ = ("_outputs", "_tokens_of_bytes")

    def __init__(self) -> None:
        self._tokens_of_bytes: dict[str, FittedLine] = {}
        self._outputs: dict[tuple[str, str], Quantiles] = {}

    # Where the records are full, `_line` and `_output` teach a shared record, and a model or class that has none
    # of its own is estimated as unlearned.

    def _line(self, model: str) -> FittedLine:
        line = self._tokens_of_bytes.get(model)
        if line is None:
            if len(self._tokens_of_bytes) >= MAX_MODELS:
                model = ""
            line = self._tokens_of_bytes.setdefault(model, FittedLine(MEMORY))
        return line

    def _output(self, class_name: str, model: str) -> Quantiles:
        record = self._outputs.get((class_name, model))
        if record is None:
            if len(self._outputs) >= MAX_OUTPUT_RECORDS:
                class_name = model = ""
            record = self._outputs.setdefault((class_name, model), Quantiles(MEMORY))
        return record

    def estimate(self, request: Request, class_name: str) -> None:
        """Fill in `prompt_tokens`, `output_tokens` (all choices together) and `cost`."""
        tokens = request.known_prompt_tokens
        if tokens is None:
            line = self._tokens_of_bytes.get(request.model)
            learned = None if line is None else line.at(request.prompt_bytes)
            tokens = int(request.prompt_bytes * UNLEARNED_TOKENS_A_BYTE if learned is None else learned)
        request.prompt_tokens = tokens = (
            tokens if 0 < tokens <= MAX_TOKENS else 1 if tokens <= 0 else MAX_TOKENS
        )

        if not request.generates:
            request.output_tokens = 0
            request.cost = float(tokens)
            return
        # What is learned is of whole requests; the request's own bound is of each choice.
        record = self._outputs.get((class_name, request.model))
        learned = None if record is None else record.at(OUTPUT_QUANTILE)
        expected = UNLEARNED_OUTPUT_TOKENS * request.choices if learned is None else int(learned)
        bound = request.max_output_tokens
        if bound is not None and bound * request.choices < expected:
            expected = bound * request.choices
        request.output_tokens = expected = expected if expected < MAX_TOKENS else MAX_TOKENS
        request.cost = tokens + OUTPUT_TOKEN_COST * expected

    def learn(
        self, request: Request, class_name: str, *, prompt_tokens: int | None, output_tokens: int | None
    ) -> None:
        """Take in the truth about a served request; None teaches nothing."""
        if prompt_tokens is not None and request.known_prompt_tokens is None and request.prompt_bytes > 0:
            self._line(request.model).add(request.prompt_bytes, prompt_tokens)
        if output_tokens is not None and request.generates:
            self._output(class_name, request.model).add(output_tokens)

    def state(self) -> dict[str, object]:
        """What has been learned, for `/debug/state`."""
        return {
            "tokens_per_byte": {
                model: {
                    "slope": line.slope,
                    "overhead_tokens": line.intercept,
                    "samples": line.samples,
                    "relative_error": line.relative_deviation,
                    "learned": line.known,
                }
                for model, line in self._tokens_of_bytes.items()
            },
            "output_tokens": [
                {
                    "class": class_name,
                    "model": model,
                    "p50": record.at(0.5),
                    "used": record.at(OUTPUT_QUANTILE),
                    "samples": record.samples,
                }
                for (class_name, model), record in self._outputs.items()
            ],
        }
