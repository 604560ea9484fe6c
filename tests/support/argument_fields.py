"""Every field of SGLang's arguments, and why a start may carry it.

A field is refused or replaced (the rules and `resolve`), served by an engine configuration (TESTED), or
neutral: it does not change what pages and states hold, and the heading of its group in NEUTRAL says why.
"""

TESTED: dict[str, tuple[str, str]] = {
    "chunked_prefill_size": ("chunk3", "--chunked-prefill-size"),
    "context_length": ("g8", "--context-length"),
    "dtype": ("g8", "--dtype"),
    "enable_cache_report": ("g8", "--enable-cache-report"),
    "enable_metrics": ("tight", "--enable-metrics"),
    "enable_mixed_chunk": ("mixed12", "--enable-mixed-chunk"),
    "load_snapshot_publish_interval": ("g8", "--load-snapshot-publish-interval"),
    "log_level_http": ("g8", "--log-level-http"),
    "mamba_ssm_dtype": ("exact", "--mamba-ssm-dtype"),
    "max_queued_requests": ("queue", "--max-queued-requests"),
    "max_running_requests": ("g8", "--max-running-requests"),
    "model_path": ("g8", "--model-path"),
    "random_seed": ("g8", "--random-seed"),
    "skip_server_warmup": ("g8", "--skip-server-warmup"),
    "sleep_on_idle": ("g8", "--sleep-on-idle"),
}
"""Field -> a configuration of `tests/support/configs.py` that serves with it, and its flag there."""

NEUTRAL: dict[str, str] = {
    "How a server listens, reads requests and writes replies: the scheduler sees token ids either way.": """
        tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
        skip_tokenizer_init host port fastapi_root_path enable_http_worker_reuseport smg_grpc_mode grpc_mode
        grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args warmups enable_http2
        http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile ssl_certfile
        ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name
        weight_version chat_template trust_request_chat_template hf_chat_template_name completion_template
        file_storage_path return_input_ids return_output_ids reasoning_parser default_chat_template_kwargs
        enable_strict_thinking tool_call_parser tool_server sampling_defaults asr_max_buffer_seconds
        asr_max_concurrent_sessions preferred_sampling_params allow_auto_truncate stream_interval
        batch_notify_size stream_response_default_include_usage incremental_streaming_output
        enable_response_store constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode
        smg_http_sidecar_port engine_info_bootstrap_port""",
    "Logs, metrics, traces and dumps: they read.": """
        log_level log_requests log_requests_level log_requests_format log_requests_target
        uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_mfu_metrics
        enable_metrics_for_all_schedulers tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
        gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging load_publish_endpoint
        enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace
        trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file export_metrics_to_file_dir
        stat_loggers debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file
        forward_hooks msprobe_dump_config enable_layerwise_nvtx_marker enable_profile_cuda_graph
        expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
        expert_balancedness_report_mode""",
    "Processes and devices: where ranks run, and when they are given up.": """
        device base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout custom_sigquit_handler numa_node
        gc_threshold nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank""",
    "How weights are found, loaded, stored and multiplied: projections stay SGLang's.": """
        load_format model_loader_extra_config trust_remote_code revision model_config_parser
        json_model_override_args quantization modelopt_quant modelopt_checkpoint_restore_path
        modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve rl_quant_profile
        custom_weight_loader weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine modelexpress_config download_dir
        model_checksum delete_ckpt_after_loading decrypted_config_file decrypted_draft_config_file
        checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket weight_cache_timeout
        enable_weights_cpu_backup enable_draft_weights_cpu_backup cpu_offload_gb offload_group_size
        offload_num_in_group offload_prefetch_step offload_mode enable_fp32_lm_head enable_tf32_matmul
        fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend enable_fused_qk_norm_rope
        disable_flashinfer_autotune flashinfer_autotune_skip_ops""",
    "Scales of an 8-bit KV: SGLang divides by them before it stores, our views take what it stores.": """
        quantization_param_path""",
    "Sampling, after the forward.": """
        enable_custom_logit_processor enable_watermark watermark_config watermark_key watermark_key_b
        watermark_context_window watermark_mixing_probability watermark_max_probability
        watermark_default_enabled watermark_enforce_all sampling_mask_max_tokens disable_outlines_disk_cache
        sampling_backend grammar_backend mlx_enable_sampling""",
    "What a forward computed, returned too; of cached tokens there is none, as in stock SGLang.": """
        enable_return_hidden_states return_hidden_states_mode enable_return_aux_hidden_states
        aux_hidden_state_capture return_aux_hidden_state_layer_ids""",
    "Variants of the attention kernels that the rules leave: they read the same slots.": """
        enable_lean_attention triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size flashinfer_mla_disable_ragged""",
    "Sizes of decode graphs, and whether there are any; prefill graphs are off.": """
        cuda_graph_max_bs_decode cuda_graph_bs_decode disable_decode_cuda_graph disable_cuda_graph
        disable_cuda_graph_padding enable_cudagraph_gc cuda_graph_max_bs_prefill
        cuda_graph_max_seq_len_prefill cuda_graph_bs_prefill cuda_graph_prefill_max_context
        disable_prefill_cuda_graph""",
    "Which request runs when: every order is one that requests may come in.": """
        prefill_decode_interval prefill_decode_interval_min_bs max_prefill_tokens prefill_max_requests
        schedule_policy enable_priority_scheduling disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
        scheduler_recv_interval min_free_slots_delay""",
    "Read by nothing in this SGLang.": "num_continuous_decode_steps",
    "SGLang turns it into --attn-dp-size before any rule is asked, which is refused.": "enable_dp_attention",
    "Eager steps, one after another: how every configuration here runs, since a CPU has no overlap.": """
        disable_overlap_schedule""",
    "Ranks that hold parts of the same layers: each lays out its own heads, and all decide alike.": "tp_size",
    "Replicas: a scheduler, a tree and a memory each.": "dp_size load_balance_method",
    "How ranks sum and exchange activations and experts: paged layers see the result.": """
        enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
        pre_warm_nccl boundary_reduction enable_quant_communications enable_flashinfer_allreduce_fusion
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
        enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
        disable_aiter_allreduce_fusion_in_decode enable_fused_moe_sum_all_reduce moe_a2a_backend
        enable_w4a4_mxfp4_megamoe deepep_v2_mode moe_runner_backend flashinfer_mxfp4_moe_precision deepep_mode
        fuseep_mode deepep_dispatcher_output_dtype flashinfer_a2a_dispatch_type ep_num_redundant_experts
        ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold deepep_config
        mooncake_ib_device enable_waterfill disable_flashinfer_cutlass_moe_fp4_allgather
        disable_shared_experts_fusion enforce_shared_experts_fusion enable_paged_experts
        paged_experts_num_resident kt_weight_path kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts
        kt_max_deferred_experts_per_token moe_dp_size dwdp_size enable_shared_experts_attn_tp
        shared_experts_tp_size enable_p2p_check ep_size moe_dense_tp_size disable_attn_tp_gather""",
    "Adapters change projections, and their name is part of the key that the tree separates by.": """
        enable_lora enable_lora_overlap_loading max_lora_rank lora_target_modules lora_paths max_loaded_loras
        max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size experts_shared_outer_loras
        lora_use_virtual_experts lora_strict_loading lora_drain_wait_threshold""",
    "Images and sound before the language model: an image's hash stands in for its tokens in the tree.": """
        enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process enable_prefix_mm_cache
        mm_enable_dp_encoder mm_process_config mm_processor_worker_num mm_io_worker_num allowed_media_domains
        media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes
        limit_mm_data_per_request enable_mm_global_cache image_processor_backend mm_global_cache_backend
        disable_fast_image_processor mm_feature_transport language_model_only
        enable_precise_embedding_interpolation""",
    "Acts with speculative decoding alone, which is refused.": """
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank uno_lora_path
        speculative_draft_model_path speculative_boundary_reduction speculative_draft_model_revision
        speculative_draft_load_format speculative_num_steps speculative_eagle_topk
        speculative_num_draft_tokens
        speculative_dflash_block_size speculative_domino_candidate_pool_size speculative_dspark_block_size
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_use_block_verification
        speculative_token_map speculative_attention_mode speculative_draft_attention_backend
        speculative_dsa_topk_backend speculative_draft_kv_cache_dtype speculative_draft_window_size
        speculative_draft_sink_size speculative_moe_runner_backend speculative_moe_a2a_backend
        speculative_enable_w4a4_mxfp4_megamoe speculative_draft_model_quantization
        _speculative_draft_quantization_explicitly_set enable_multi_layer_eagle speculative_adaptive
        speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth
        speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
        speculative_ngram_capacity speculative_ngram_external_corpus_path
        speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens""",
    "Acts with disaggregation, of prefill and decode or of encoders, alone, which is refused.": """
        disaggregation_decode_allocation_policy disaggregation_transfer_backend
        disaggregation_enable_kv_checksum disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval enable_pd_role_switch optimistic_prefill_attempts
        encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder pdmux_config_path sm_group_num
        disaggregation_decode_host_receive_threshold""",
    "Acts with another field alone that is refused.": """
        _radix_eviction_policy_explicitly_set radix_eviction_policy_config hicache_host_memory_mode
        hicache_ratio hicache_size hicache_host_memory_fraction hicache_write_policy hicache_io_backend
        hicache_mem_layout hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
        unified_cache_external_linker_backend unified_cache_external_linker_config enable_linker_mla_dedup
        hisparse_config lmcache_config_file flexkv_config_file prefill_kv_cache_dequant_dtype
        mamba_cache_philox_rounds mamba_track_interval int8_mamba_ckpt_size linear_replayssm_cache_len
        enable_torch_compile_debug_mode torch_compile_max_bs kv_canary_real_data kv_canary_sweep_interval
        pp_max_micro_batch_size pp_async_batch_depth enable_dynamic_chunking dcp_comm_backend
        dcp_replicate_q_proj cp_strategy enable_cp_decode_attn_tp enable_dp_attention_local_control_broadcast
        enable_dp_lm_head enable_tp_lm_head_all_to_all enable_dense_mlp_attn_tp
        enable_megamoe_for_layernorm_sp prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
        dllm_algorithm_config dllm_fdfo tbo_token_distribution_threshold enable_elastic_expert_backup
        ep_join_mode elastic_ep_scale_timeout ep_join_rank_offset elastic_ep_initial_size max_ep_size""",
    "Acts in families or on devices that are not served.": """
        enable_return_indexer_topk enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay
        dsa_prefill_backend dsv4_prefill_backend dsa_triton_union dsa_decode_backend dsv4_attn_backend
        dsa_paged_mqa_logits_backend dsa_topk_backend enable_deepseek_v4_fp4_indexer enable_dsa_fused_indexer
        enable_dsa_cache_layer_split qsa_indexer_dtype enable_scattered_sconv ple_offload_embedding
        ple_offload_backend ple_offload_dir c128_page_size swa_full_tokens_ratio
        _swa_full_tokens_ratio_explicitly_set swa_prefix_tails disable_hybrid_swa_memory
        disable_chunked_prefix_cache""",
    "Derived by resolution; no user sets it.": "uses_mamba_radix_cache enable_cp_tp_group_sharing",
}
"""Why a group of fields needs neither a rule nor an engine test of its own."""
