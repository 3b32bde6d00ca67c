"""A recipe with everything that a rehearsal changes."""

BASE = """
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 16, max_num_steps: 1000, val_period: 10, seed: 42}
loss_fn: {name: gspo, token_level_loss: false, ratio_clip_min: 3.0e-4, ratio_clip_max: 4.0e-4}
policy:
  model_name: Qwen/Qwen3-30B-A3B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 512
  train_micro_batch_size: 4
  logprob_batch_size: ${policy.train_micro_batch_size}
  max_total_sequence_length: 4096
  precision: bfloat16
  make_sequence_length_divisible_by: 1
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0e-6}}
  dtensor_cfg: {enabled: true, _v2: false, tensor_parallel_size: 2, context_parallel_size: 2}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 4}
  sequence_packing: {enabled: true, train_mb_tokens: 16384, logprob_mb_tokens: 16384, sequence_length_round: 64}
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
    vllm_cfg: {precision: "${policy.precision}", tensor_parallel_size: 4, max_model_len: 4096, enforce_eager: false}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05, output_key: answer}
  validation: null
  default: {prompt_file: cot.txt, env_name: math}
env: {math: {num_workers: 8}}
checkpointing: {enabled: true, checkpoint_dir: results/x, save_period: 10, metric_name: "val:accuracy"}
logger: {log_dir: logs, wandb_enabled: true, monitor_gpus: true}
cluster: {gpus_per_node: 8, num_nodes: 4}
"""
