"""What the plugin hooks into, or names, of vLLM."""

# Module and attribute; fields of dataclasses that have no default are none, and experts.py asks for
# those.
HOOKS = (
    "vllm.envs:environment_variables",
    "vllm.envs:VLLM_BATCH_INVARIANT",
    "vllm.envs:VLLM_ROCM_USE_SKINNY_GEMM",
    "vllm.logger:init_logger",
    "vllm.model_executor.kernels.linear:_POSSIBLE_FP8_KERNELS",
    "vllm.model_executor.kernels.linear:_POSSIBLE_FP8_BLOCK_KERNELS",
    "vllm.model_executor.kernels.linear:_POSSIBLE_WFP8A16_KERNELS",
    "vllm.model_executor.kernels.linear:FP8ScaledMMLinearKernel.apply_scaled_mm",
    "vllm.model_executor.kernels.linear:Fp8BlockScaledMMLinearKernel.apply_block_scaled_mm",
    "vllm.model_executor.layers.fusion.quant_activation:QuantizedActivation",
    "vllm.model_executor.layers.fusion.quant_activation:as_quantized_activation",
    "vllm.model_executor.layers.fusion.quant_activation:expose_input_quant_key",
    "vllm.model_executor.layers.fusion.fused_act_quant:_FUSED_ACT_QUANT",
    "vllm.model_executor.layers.fused_moe.oracle.fp8:select_fp8_moe_backend",
    "vllm.model_executor.layers.fused_moe.oracle.fp8:Fp8MoeBackend.TRITON",
    "vllm.model_executor.layers.fused_moe.oracle.unquantized:select_unquantized_moe_backend",
    "vllm.model_executor.layers.fused_moe.oracle.unquantized:UnquantizedMoeBackend.TRITON",
    "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExpertsModular.apply",
    "vllm.model_executor.layers.fused_moe.modular_kernel:ApplyMoEActivationConfig.clamp_limit",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEQuantConfig.gemm1_clamp_limit",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig.use_all2all_kernels",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig.use_ag_rs_all2all_kernels",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig.use_passthrough_all2all",
    "vllm.model_executor.layers.utils:rocm_unquantized_gemm",
    "vllm.compilation.passes.fusion.rms_quant_fusion:FUSED_OPS",
    "vllm.compilation.passes.fusion.rms_quant_fusion:FusedRMSQuantKey",
    "vllm.compilation.passes.fusion.act_quant_fusion:FUSED_OPS",
    "vllm._custom_ops:reshape_and_cache_flash",
    "vllm.config:get_current_vllm_config_or_none",
    "vllm.v1.attention.backend:AttentionBackend.supports_combination",
    "vllm.v1.attention.backend:AttentionCGSupport.UNIFORM_BATCH",
    "vllm.v1.attention.backend:AttentionMetadataBuilder._init_reorder_batch_threshold",
    "vllm.v1.attention.backend:AttentionImpl.forward",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.CUSTOM",
    "vllm.v1.attention.backends.registry:register_backend",
    "vllm.v1.attention.backends.utils:split_decodes_and_prefills",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer",
)

# Those that the oldest vLLM has not got, which the plugin does without.
YOUNGER = (
    "vllm.model_executor.layers.fusion.fused_act_quant:_FUSED_ACT_QUANT",
    "vllm.model_executor.layers.fused_moe.modular_kernel:ApplyMoEActivationConfig.clamp_limit",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEParallelConfig.use_passthrough_all2all",
)
