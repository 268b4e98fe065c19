use super::*;

#[test]
fn a_copy_has_the_name_the_labels_and_the_values_that_dashboards_of_vllm_ask_for() {
    let text = "# HELP tutti_ready 1.\n\
                # TYPE tutti_ready gauge\n\
                tutti_ready 1\n\
                # HELP tutti_conductor_requests_running Requests.\n\
                # TYPE tutti_conductor_requests_running gauge\n\
                tutti_conductor_requests_running 3\n\
                # HELP tutti_worker_cached_tokens Tokens.\n\
                # TYPE tutti_worker_cached_tokens gauge\n\
                tutti_worker_cached_tokens{worker=\"1\"} 7\n\
                # HELP tutti_router_request_seconds Seconds.\n\
                # TYPE tutti_router_request_seconds histogram\n\
                tutti_router_request_seconds_sum 1.5\n\
                tutti_router_request_seconds_bucket{le=\"0.1\"} 2\n\
                # HELP tutti_router_choices_finished Choices.\n\
                # TYPE tutti_router_choices_finished counter\n\
                tutti_router_choices_finished_total{reason=\"stop\"} 9\n\
                # EOF\n";
    let expected = "# HELP vllm:num_requests_running Requests.\n\
                    # TYPE vllm:num_requests_running gauge\n\
                    vllm:num_requests_running{model_name=\"a\\\"b\"} 3\n\
                    # HELP vllm:prefix_cache_hits Tokens.\n\
                    # TYPE vllm:prefix_cache_hits counter\n\
                    vllm:prefix_cache_hits_total{model_name=\"a\\\"b\",engine=\"1\"} 7\n\
                    # HELP vllm:e2e_request_latency_seconds Seconds.\n\
                    # TYPE vllm:e2e_request_latency_seconds histogram\n\
                    vllm:e2e_request_latency_seconds_sum{model_name=\"a\\\"b\"} 1.5\n\
                    vllm:e2e_request_latency_seconds_bucket{model_name=\"a\\\"b\",le=\"0.1\"} 2\n\
                    # HELP vllm:request_success Choices.\n\
                    # TYPE vllm:request_success counter\n\
                    vllm:request_success_total{model_name=\"a\\\"b\",finished_reason=\"stop\"} 9\n";
    assert_eq!(copies(text, "a\"b"), expected);
    assert_eq!(copies("# EOF\n", "x"), "");
}
