"""What mistakes in a run file are answered: remedies by kind, and other programs' words."""

REMEDIES = {
    "greater_than": "use a number greater than {gt}",
    "greater_than_equal": "use {ge} or more",
    "less_than": "use a number less than {lt}",
    "less_than_equal": "use {le} or less",
    "finite_number": "give a finite number",
    "string_type": "give text, in quotes",
    "string_too_short": "give some text, or leave it out",
    "literal_error": "use {expected}",
    "union_tag_invalid": "use {expected_tags}",
    "tuple_type": "write a list, as in [{given}]",
    "string_pattern_mismatch": "use letters, digits, -, _ and ., at most 63",
    "too_short": "give at least {min_length}",
    "too_long": "give at most {max_length}",
    "byte_size": 'write a size, as in "8GB" or "512MiB"',
    "byte_size_unit": 'write a size, as in "8GB" or "512MiB"',
}
OTHERS = {
    **dict.fromkeys(("learning_rate", "max_lr", "peak_lr"), "lr"),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "hidden_dim"), "width"),
    **dict.fromkeys(("n_layer", "n_layers", "num_hidden_layers", "depth"), "layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_attention_heads"), "heads"),
    **dict.fromkeys(("vocab_size",), "vocab"),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "block_size", "seq_len"), "context"),
    **dict.fromkeys(("num_epochs", "max_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "accumulate"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping"), "clip_norm"),
    **dict.fromkeys(("wd",), "weight_decay"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "decay"),
    **dict.fromkeys(("dp", "data_parallel", "dp_degree"), "replicas"),
    **dict.fromkeys(("pp", "pp_degree", "num_stages"), "stages"),
    **dict.fromkeys(("micro_batches", "num_microbatches"), "microbatches"),
    **dict.fromkeys(("dtype", "mixed_precision", "bf16", "fp16"), "precision"),
    **dict.fromkeys(("r", "lora_r"), "rank"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization"), "weights"),
    **dict.fromkeys(("quantization_config", "torch_dtype"), "weights"),
    **dict.fromkeys(("cpu_offload", "offload_optimizer"), "offload"),
}
"""Settings of other programs, and ours."""
KINDS = {
    "folder": "a Hugging Face model (pretrained or config)",
    "own": "a model of your own (factory)",
    "shape": "ThinPipe's own model, without pretrained, config or factory",
}
"""Names of kinds of [model]; tables elsewhere have a `kind`."""
TYPE_REMEDIES = {
    "int": "give a whole number",
    "float": "give a number",
    "bool": "use true or false",
}
