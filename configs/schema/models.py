"""Which networks take part, and how long their texts may be."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import Layers, Section, Tokens, UserPath, at_most

QUICKSTART_BASE = "quickstart"


class ModelsConfig(Section):
    """Folders of the base models (Hugging Face layout, safetensors, with tokenizer) and shared limits."""

    base: UserPath
    """Folder of the policy's base model, or `quickstart` for the tiny Llama that the project builds itself."""
    teacher: UserPath | None = None
    """Folder of the teacher reward model's base; null: the reference policy (the base after sft)."""
    teacher_layers: Layers | None = None
    """Keep only the first N decoder layers of the teacher's base; null: all."""
    student: UserPath | None = None
    """Folder of the student reward model's base; null: the reference policy."""
    student_layers: Layers | None = None
    """Keep only the first N decoder layers of the student's base; null: all."""
    share_backbone: Literal["auto", "never"] = "auto"
    """auto: policy, critic and student are adapters on one frozen backbone where they share a base; never: copies."""
    layout: Literal["auto", "padded", "shared", "packed"] = "auto"
    """How a group (one prompt, several responses) is laid out; shared stores the prompt once, packed fills rows with
    whole sequences (users of verl: use_remove_padding). All give the same numbers."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights' type; auto: float32 on CPU, bfloat16 on a GPU that has it. Losses are float32 always."""
    max_prompt_length: Tokens = 1024
    """Tokens of a prompt; longer ones are cut from the left, so that the answer survives."""
    max_response_length: Tokens = 2048
    """Tokens of a response, EOS included; longer ones are cut from the right and lose their EOS."""
    chat_template: Literal["auto", "plain"] = "auto"
    """auto: the tokenizer's own chat template when it has one; plain: role names and newlines."""
    quickstart_hidden_size: Annotated[int, Field(ge=1), at_most(16_384, "(the width of a layer)")] = 128
    """Width of the tiny Llama that `base: quickstart` builds; a multiple of 32."""
    quickstart_layers: Layers = 6
    """Decoder layers of the tiny Llama that `base: quickstart` builds."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    @model_validator(mode="after")
    def _layers_of_something(self) -> ModelsConfig:
        if self.base == QUICKSTART_BASE and self.teacher is not None:
            raise ValueError(
                "models.teacher: the quickstart builds its own base; leave teacher empty or name a base folder"
            )
        if self.quickstart_hidden_size % 32:
            raise ValueError(
                f"models.quickstart_hidden_size is {self.quickstart_hidden_size}; "
                "write a multiple of 32 (heads are 32 wide)"
            )
        return self
