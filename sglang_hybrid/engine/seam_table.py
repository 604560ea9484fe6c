"""Every name of SGLang that is hooked, subclassed or called by an adapter, as it stands in 0.5.23.

One row a name: its parameters in order, or the fields of a record.  Recorded from the installed source;
`seams.check_seams` compares.
"""

from __future__ import annotations

from sglang_hybrid.engine.seams import Seam

SEAMS: tuple[Seam, ...] = (
    Seam("prometheus_client.mmap_dict:MmapedDict.read_all_values_from_file", "filename", child_only=True),
    Seam("prometheus_client.mmap_dict:MmapedDict.write_value", "self key value timestamp", child_only=True),
    Seam(
        "prometheus_client.mmap_dict:mmap_key",
        "metric_name name labelnames labelvalues help_text",
        child_only=True,
    ),
    Seam("sglang.srt.arg_groups.arg_utils:NS", "path"),
    Seam("sglang.srt.arg_groups.mamba_hook:validate_mamba_no_buffer", "view model_arch"),
    Seam(
        "sglang.srt.arg_groups.model_override_base:get_default_attn_backend",
        "server_args use_mla_backend model_config",
    ),
    Seam("sglang.srt.arg_groups.model_override_base:use_mla_backend", "server_args"),
    Seam("sglang.srt.arg_groups.overrides:attention_backends_of", "cfg"),
    Seam("sglang.srt.arg_groups.overrides:declare_resolution", "server_args source fields"),
    Seam("sglang.srt.arg_groups.overrides:model_config_of", "server_args"),
    Seam("sglang.srt.arg_groups.overrides:post_capture_kv_sizing_planned", "server_args"),
    Seam("sglang.srt.arg_groups.overrides:resolving_view", "server_args"),
    Seam("sglang.srt.arg_groups.resolution_hooks:register_resolution_hook", "name"),
    Seam("sglang.srt.entrypoints.ollama.serving:OllamaServing.handle_chat", "self request raw_request"),
    Seam("sglang.srt.entrypoints.ollama.serving:OllamaServing.handle_generate", "self request raw_request"),
    Seam("sglang.srt.layers.attention.attention_registry:attn_backend_wrapper", "runner full_attn_backend"),
    Seam("sglang.srt.layers.attention.base_attn_backend:AttentionBackend.shared_read_ends", "self fm"),
    Seam("sglang.srt.layers.attention.base_attn_backend:SharedReadEnds"),
    Seam(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.__init__",
        "self model_runner",
    ),
    Seam(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.forward",
        "self mixer hidden_states output layer_id forward_batch mup_vector use_triton_causal_conv",
    ),
    Seam(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.init_cuda_graph_state",
        "self max_bs max_num_tokens",
    ),
    Seam(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.init_forward_metadata",
        "self forward_batch",
    ),
    Seam(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.init_forward_metadata_out_graph",
        "self forward_batch in_capture",
    ),
    Seam("sglang.srt.layers.attention.linear.gdn_backend:GDNAttnBackend.__init__", "self model_runner"),
    Seam(
        "sglang.srt.layers.attention.linear.gdn_backend:GDNAttnBackend.forward_decode",
        "self layer forward_batch mixed_qkv a b kwargs",
    ),
    Seam(
        "sglang.srt.layers.attention.linear.gdn_backend:GDNAttnBackend.forward_extend",
        "self layer forward_batch mixed_qkv a b kwargs",
    ),
    Seam("sglang.srt.layers.attention.linear.kda_backend:KDAAttnBackend.__init__", "self model_runner"),
    Seam(
        "sglang.srt.layers.attention.linear.kda_backend:KDAAttnBackend.forward_decode",
        "self layer forward_batch mixed_qkv a b kwargs",
    ),
    Seam(
        "sglang.srt.layers.attention.linear.kda_backend:KDAAttnBackend.forward_extend",
        "self layer forward_batch mixed_qkv a b kwargs",
    ),
    Seam(
        "sglang.srt.layers.attention.linear.short_conv_backend:ShortConvAttnBackend.__init__",
        "self model_runner",
    ),
    Seam(
        "sglang.srt.layers.attention.linear.short_conv_backend:ShortConvAttnBackend.conv_state_metadata",
        "self layer_id forward_batch",
    ),
    Seam(
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.__init__",
        "self model_runner",
    ),
    Seam(
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.forward_decode",
        "self q k v layer forward_batch save_kv_cache",
    ),
    Seam(
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.forward_extend",
        "self q k v layer forward_batch save_kv_cache",
    ),
    Seam(
        "sglang.srt.layers.attention.mamba.mamba:MambaMixer2.forward",
        "self hidden_states output layer_cache metadata mup_vector use_triton_causal_conv",
    ),
    Seam("sglang.srt.managers.io_struct:AbortReq"),
    Seam("sglang.srt.managers.io_struct:EmbeddingReqInput.normalize_batch_and_arguments", "self"),
    Seam("sglang.srt.managers.io_struct:GenerateReqInput.normalize_batch_and_arguments", "self"),
    Seam("sglang.srt.managers.io_struct:PositionalEmbeds"),
    Seam(
        "sglang.srt.managers.io_struct:TokenizedEmbeddingReqInput",
        "rid http_worker_ipc input_text input_ids mm_inputs token_type_ids sampling_params lora_id "
        "positional_embed_overrides routed_dp_rank priority dimensions return_pooled_hidden_states "
        "multi_item_delimiter_indices token_indices_to_pool decision_layout time_stats lora_name",
    ),
    Seam(
        "sglang.srt.managers.io_struct:TokenizedGenerateReqInput",
        "rid http_worker_ipc input_text input_ids input_embeds mm_inputs token_type_ids "
        "sampling_params return_logprob logprob_start_len top_logprobs_num token_ids_logprob stream "
        "return_sampling_mask return_flat_raw_top_logprobs return_hidden_states "
        "return_routed_experts routed_experts_start_len return_indexer_topk session_id "
        "session_params lora_id custom_logit_processor positional_embed_overrides bootstrap_host "
        "bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank "
        "disagg_prefill_dp_rank routing_key require_reasoning priority extra_key no_logs "
        "return_bytes return_entropy need_wait_for_mm_inputs num_items_assigned encoder_urls "
        "multi_item_delimiter_indices token_indices_to_pool time_stats cache_salt kv_hints "
        "pp_prefetch_ticketed sampling_logprobs_mode lora_name",
    ),
    Seam("sglang.srt.managers.schedule_batch:Req.init_next_round_input", "self tree_cache cow_mamba"),
    Seam("sglang.srt.managers.schedule_batch:Req.refresh_fill_ids", "self"),
    Seam(
        "sglang.srt.managers.schedule_batch:ReqKvInfo",
        "req_pool_idx cache_protected_len cache_inserted_len kv_committed_len kv_allocated_len "
        "swa_evict_floor component_evicted_seqlens retraction_backup mamba_pool_idx "
        "mamba_ping_pong_track_buffer mamba_ping_pong_empty mamba_next_track_idx mamba_last_track_idx "
        "mamba_last_track_seqlen mamba_prev_track_seqlen mamba_untracked_decode_batch_idx "
        "mamba_cow_src_index mamba_needs_clear",
    ),
    Seam("sglang.srt.managers.schedule_policy:AddReqResult"),
    Seam(
        "sglang.srt.managers.schedule_policy:PrefillAdder.__init__",
        "self page_size tree_cache token_to_kv_pool_allocator running_batch new_token_ratio "
        "rem_input_tokens rem_chunk_tokens num_mixed_decode_tokens "
        "priority_scheduling_preemption_threshold max_prefill_bs max_running_requests "
        "prefill_max_requests prefill_delayer_single_pass dllm_config waiting_queue_len "
        "prefill_tile_block_m",
    ),
    Seam("sglang.srt.managers.schedule_policy:PrefillAdder.add_chunked_req", "self req"),
    Seam(
        "sglang.srt.managers.schedule_policy:PrefillAdder.add_one_req",
        "self req has_chunked_req truncation_align_size",
    ),
    Seam(
        "sglang.srt.managers.schedule_policy:PrefillAdder._commit_prefill_admission",
        "self req admission mamba_gap_reserve",
    ),
    Seam(
        "sglang.srt.managers.schedule_policy:PrefillAdder._get_running_request_total_token_offset",
        "self req",
    ),
    Seam("sglang.srt.managers.schedule_policy:PrefillAdder.preempt_to_schedule", "self req"),
    Seam("sglang.srt.managers.scheduler:Scheduler._add_request_to_queue", "self req is_retracted"),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler._get_new_batch_prefill_raw",
        "self prefill_delayer_single_pass running_batch",
    ),
    Seam("sglang.srt.managers.scheduler:Scheduler._release_aborted_request", "self req"),
    Seam("sglang.srt.managers.scheduler:Scheduler.get_internal_state", "self recv_req"),
    Seam("sglang.srt.managers.scheduler:Scheduler.get_output_streamer_class", "self"),
    Seam("sglang.srt.managers.scheduler:Scheduler.get_prefill_adder_class", "self"),
    Seam("sglang.srt.managers.scheduler:Scheduler.handle_embedding_request", "self recv_req mm_input_error"),
    Seam("sglang.srt.managers.scheduler:Scheduler.handle_generate_request", "self recv_req mm_input_error"),
    Seam("sglang.srt.managers.scheduler:Scheduler.process_input_requests", "self recv_reqs"),
    Seam("sglang.srt.managers.scheduler:Scheduler.send_abort_output", "self abort_req req"),
    Seam(
        "sglang.srt.managers.scheduler_components.output_streamer:"
        "SchedulerOutputStreamer.is_request_level_customized_info_key",
        "self key",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.dump_expert_distribution_record",
        "self",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.release_memory_occupation",
        "self obj request",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.resume_memory_occupation",
        "self obj request",
    ),
    Seam("sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin._execute_profile", "self req"),
    Seam(
        "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.start_expert_distribution_record",
        "self",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.stop_expert_distribution_record",
        "self",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager._create_tokenized_object",
        "self obj input_text input_ids input_embeds mm_inputs token_type_ids",
    ),
    Seam("sglang.srt.managers.tokenizer_manager:TokenizerManager._stream_one_response"),
    Seam("sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request", "self obj request"),
    Seam(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager.score_request",
        "self query items label_token_ids apply_softmax item_first embed_override_token_id "
        "query_embed_overrides item_embed_overrides stacked_query_item_embed_overrides request "
        "return_pooled_hidden_states score_extraction_token_id temperature return_token_logprobs "
        "image_data",
    ),
    Seam("sglang.srt.managers.tp_worker:TpModelWorker.get_worker_info", "self"),
    Seam("sglang.srt.mem_cache.allocation:alloc_for_decode_default", "batch token_per_req"),
    Seam("sglang.srt.mem_cache.allocation:alloc_for_extend", "batch"),
    Seam("sglang.srt.mem_cache.allocation:ensure_mamba_capacity", "req_to_token_pool reqs tree_cache"),
    Seam(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.__init__",
        "self size page_size dtype device kvcache need_sort",
    ),
    Seam(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator._release_page_ids",
        "self page_ids",
    ),
    Seam(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.alloc_decode",
        "self seq_lens seq_lens_cpu last_loc",
    ),
    Seam(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.alloc_extend",
        "self prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens num_new_pages",
    ),
    Seam("sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.available_size", "self"),
    Seam(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.check_decode_capacity",
        "self num_tokens tree_cache requests spec_algorithm",
    ),
    Seam("sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.clear", "self"),
    Seam(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.create_prefill_budget",
        "self tree_cache num_mixed_decode_tokens",
    ),
    Seam(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.evict_to_free_tokens",
        "self tree_cache num_tokens",
    ),
    Seam("sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.free", "self free_index"),
    Seam("sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.free_group_begin", "self"),
    Seam("sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.free_group_end", "self"),
    Seam(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.free_segment",
        "self free_index start_pos",
    ),
    Seam("sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.get_all_free_pages", "self"),
    Seam(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.get_extend_allocation_demand",
        "self prefix_lens_cpu seq_lens_cpu conservative_num_tokens shard_size",
    ),
    Seam(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.max_new_tokens_for_memory",
        "self input_tokens max_new_tokens token_capacity sliding_window_size chunk_size",
    ),
    Seam(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.request_slot_reserve",
        "self has_req_pool_slot prefill_tokens",
    ),
    Seam("sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.verify_byte_accounting", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.available_and_evictable_str", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.checkpoint", "self req up_to kwargs"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.claim_kv_row", "self req"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.dec_lock_ref", "self node params"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.dfs_weight_order", "self node_handles"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.evict", "self params"),
    Seam(
        "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.evict_for_alloc",
        "self params allocation_reclaim_satisfied",
    ),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.evictable_size", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.finish", "self handle outcome"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.free_kv_row", "self kv ranges"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.full_evictable_size", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.full_protected_size", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.inc_lock_ref", "self node"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.init_metrics_collector", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.lock", "self node"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.match_prefix", "self params"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.path_device_indices", "self node"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.pretty_print", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.protected_size", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.release_aborted_request", "self handle"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.reset", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.root_node_handle", "self extra_key"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.supports_fast_match_prefix", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.supports_mamba", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.supports_prefix_sharing", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.total_size", "self"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.unlock", "self lock"),
    Seam(
        "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.update_eviction_metrics",
        "self num_evicted start_time",
    ),
    Seam(
        "sglang.srt.mem_cache.base_prefix_cache:DecLockRefParams",
        "node_id skipped_lock_components component_lock_uuids component_host_lock_uuids",
    ),
    Seam("sglang.srt.mem_cache.base_prefix_cache:DecLockRefResult", "delta"),
    Seam("sglang.srt.mem_cache.base_prefix_cache:EvictParams", "num_tokens swa_num_tokens mamba_num"),
    Seam(
        "sglang.srt.mem_cache.base_prefix_cache:EvictResult",
        "num_tokens_evicted swa_num_tokens_evicted mamba_num_evicted",
    ),
    Seam(
        "sglang.srt.mem_cache.base_prefix_cache:IncLockRefResult",
        "delta node_id skipped_lock_components component_lock_uuids component_host_lock_uuids",
    ),
    Seam("sglang.srt.mem_cache.base_prefix_cache:MatchPrefixParams", "key cow_mamba req"),
    Seam(
        "sglang.srt.mem_cache.base_prefix_cache:MatchResult",
        "device_prefix_len last_device_node last_host_node best_match_node host_hit_length "
        "swa_host_hit_length swa_branching_seqlen mamba_host_hit_length mamba_branching_seqlen "
        "cache_protected_len full_kv_hit_length cache_actions last_visited_node_id full_device_match_len",
    ),
    Seam("sglang.srt.mem_cache.base_prefix_cache:TreeLock", "node receipt swa_released"),
    Seam(
        "sglang.srt.mem_cache.cache_init_params:CacheInitParams",
        "disable req_to_token_pool token_to_kv_pool_allocator page_size is_eagle tp_cache_group "
        "attn_cp_cache_group attn_tp_cache_group pp_cache_group eviction_policy eviction_policy_config "
        "enable_metrics enable_kv_cache_events dynamo_kv_event_format kv_event_lora_names "
        "enable_session_radix_cache enable_mamba_extra_buffer enable_mamba_extra_buffer_lazy pp_rank "
        "pp_size attn_cp_rank attn_cp_size chunked_prefill_size sliding_window_size "
        "swa_gates_prefix_match decoder_swa_bounded_replay draft_swa_window tree_components "
        "component_registry_override mtp_draft_device_pools sidecar_draft_device_pools "
        "mtp_draft_mamba_pools tree_core_backend",
    ),
    Seam("sglang.srt.mem_cache.common:checkpoint_kv_cache", "req tree_cache"),
    Seam("sglang.srt.mem_cache.common:release_kv_cache", "req tree_cache checkpoint"),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._handle_max_mamba_cache",
        "self total_rest_memory",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._init_pools",
        "self sizes req_to_token_pool token_to_kv_pool_allocator",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes",
        "self pre_model_load_memory",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator.config_from_budget",
        "self budget_bytes cap_tokens",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator.resolve_max_num_reqs",
        "self token_capacity",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator:_InitializedPools",
        "req_to_token_pool token_to_kv_pool token_to_kv_pool_allocator unified_memory_pool",
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool.__init__",
        "self size dtype page_size head_num head_dim full_attention_layer_ids device mamba_pool "
        "enable_memory_saver enable_kv_cache_copy use_mla kv_lora_rank qk_rope_head_dim use_dsa "
        "index_head_dim kv_cache_dim index_kpool index_kpool_compress tail_extra_slots "
        "max_running_requests skip_topk_layers start_layer full_kv_pool_class quant_method full_kv_pool "
        "post_capture_active",
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.__init__",
        "self size mamba_size mamba_spec_state_size max_context_len device enable_memory_saver "
        "cache_params mamba_layer_ids enable_mamba_extra_buffer enable_mamba_extra_buffer_lazy "
        "speculative_num_draft_tokens speculative_eagle_topk enable_overlap_schedule start_layer "
        "enable_linear_replayssm linear_replayssm_cache_len mamba_envelope_layout "
        "enable_linear_replayssm_spec short_conv_layer_ids short_conv_state_shape ngram_context_len "
        "ngram_eos_token_id",
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool._init_mamba_pool",
        "self mamba_size mamba_spec_state_size cache_params mamba_layer_ids device "
        "enable_mamba_extra_buffer speculative_num_draft_tokens speculative_eagle_topk "
        "enable_linear_replayssm linear_replayssm_cache_len mamba_envelope_layout "
        "enable_linear_replayssm_spec short_conv_layer_ids short_conv_state_shape ngram_context_len "
        "ngram_eos_token_id",
    ),
    Seam("sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.alloc", "self reqs"),
    Seam(
        "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.alloc_aux_to_lengths",
        "self req_pool_indices_cpu target_seq_lens_cpu",
    ),
    Seam("sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.clear", "self"),
    Seam("sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.free", "self req"),
    Seam("sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.get_mamba_indices", "self req_indices"),
    Seam("sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.mamba2_layer_cache", "self layer_id"),
    Seam("sglang.srt.mem_cache.memory_pool:KVWriteLoc", "loc swa_loc full_loc physical"),
    Seam(
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.__init__",
        "self size page_size dtype head_num head_dim layer_num device enable_memory_saver v_head_dim "
        "swa_head_num swa_head_dim swa_v_head_dim start_layer end_layer enable_alt_stream "
        "enable_kv_cache_copy kv_cache_layout quant_method post_capture_active allocation_label",
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool.__init__",
        "self size page_size dtype kv_lora_rank qk_rope_head_dim layer_num device enable_memory_saver "
        "start_layer end_layer use_dsa override_kv_cache_dim dcp_replicated",
    ),
    Seam("sglang.srt.mem_cache.memory_pool:MLATokenToKVPool._clear_buffers", "self"),
    Seam("sglang.srt.mem_cache.memory_pool:MLATokenToKVPool._create_buffers", "self"),
    Seam("sglang.srt.mem_cache.memory_pool:MLATokenToKVPool.get_kv_size_bytes", "self"),
    Seam("sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._clear_buffers", "self"),
    Seam("sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._create_buffers", "self"),
    Seam("sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._init_data_ptrs_and_strides", "self"),
    Seam("sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_kv_size_bytes", "self"),
    Seam(
        "sglang.srt.mem_cache.memory_pool:MambaPool.State",
        "conv temporal replayssm_d replayssm_k replayssm_g replayssm_rawv replayssm_rawk replayssm_beta",
    ),
    Seam("sglang.srt.mem_cache.memory_pool:ReqToTokenPool.alloc", "self reqs"),
    Seam("sglang.srt.mem_cache.memory_pool:ReqToTokenPool.clear", "self"),
    Seam("sglang.srt.mem_cache.memory_pool:ReqToTokenPool.free", "self req"),
    Seam(
        "sglang.srt.mem_cache.prefill_budget:PrefillBudget.__init__",
        "self allocator tree_cache num_mixed_decode_tokens",
    ),
    Seam("sglang.srt.mem_cache.prefill_budget:PrefillBudget._available_and_evictable", "self"),
    Seam("sglang.srt.mem_cache.prefill_budget:PrefillBudget.available_chunk_tokens", "self chunk_limit"),
    Seam(
        "sglang.srt.mem_cache.prefill_budget:PrefillBudget.can_allocate_prefill",
        "self paged_input extend_input_len max_new_tokens chunk_limit",
    ),
    Seam(
        "sglang.srt.mem_cache.prefill_budget:PrefillBudget.check_prefill",
        "self extend_input_len total_tokens max_new_tokens input_tokens swa_host_hit_length chunk_limit "
        "auxiliary_swa_host_hit_length",
    ),
    Seam(
        "sglang.srt.mem_cache.prefill_budget:PrefillBudget.fit_chunk",
        "self extend_input_len max_new_tokens chunk_limit",
    ),
    Seam("sglang.srt.mem_cache.prefill_budget:PrefillBudget.has_capacity", "self"),
    Seam(
        "sglang.srt.mem_cache.prefill_budget:PrefillBudget.reserve",
        "self extend_input_len max_new_tokens extra_tokens chunk_limit is_chunked_continuation",
    ),
    Seam("sglang.srt.mem_cache.radix_cache:RadixKey", "token_ids extra_key is_bigram limit cache_salt"),
    Seam(
        "sglang.srt.mem_cache.registry:TreeCacheBuildContext",
        "server_args params is_hybrid_swa is_hybrid_ssm enable_hierarchical_cache disable_radix_cache "
        "tp_worker model_config tp_size tp_rank tp_group full_tokens_per_layer is_dsa",
    ),
    Seam("sglang.srt.mem_cache.registry:register_radix_cache_backend", "name factory"),
    Seam("sglang.srt.plugins.hook_registry:HookRegistry._hooks"),
    Seam("sglang.srt.plugins.hook_registry:HookRegistry._patched"),
    Seam("sglang.srt.plugins.hook_registry:HookRegistry.apply_hooks", ""),
    Seam("sglang.srt.plugins.hook_registry:HookRegistry.register", "target hook hook_type source"),
    Seam("sglang.srt.runtime_context:RuntimeContext.override", "self source fields"),
    Seam("sglang.srt.runtime_context:get_context", ""),
    Seam("sglang.srt.runtime_context:get_exec", ""),
    Seam("sglang.srt.runtime_context:get_observability", ""),
    Seam("sglang.srt.runtime_context:get_parallel", ""),
    Seam("sglang.srt.runtime_context:get_schedule", ""),
    Seam("sglang.srt.runtime_context:get_server_args", ""),
    Seam("sglang.srt.runtime_context:get_serving", ""),
    Seam(
        "sglang.srt.sampling.sampling_params:SamplingParams",
        "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p "
        "frequency_penalty presence_penalty repetition_penalty min_new_tokens n beam_width "
        "json_schema regex ebnf structural_tag ignore_eos skip_special_tokens "
        "spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed "
        "custom_params watermark stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len "
        "is_normalized ebnf_full_assistant",
    ),
    Seam("sglang.srt.server_args:ServerArgs.add_cli_args", "parser"),
    Seam(
        "sglang.srt.utils.common:get_available_gpu_memory",
        "device gpu_id distributed empty_cache cpu_group",
    ),
    Seam("sglang.srt.utils.common:get_cpu_ids_by_node", ""),
    Seam("sglang.srt.utils.common:get_device_memory_capacity", "device"),
    Seam("sglang.srt.models.lfm2:Lfm2ShortConv.forward", "self hidden_states forward_batch", child_only=True),
    Seam(
        "sglang.srt.models.lfm2_moe:Lfm2MoeShortConv.forward",
        "self hidden_states forward_batch",
        child_only=True,
    ),
)
