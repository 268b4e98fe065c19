//! Tests of the transfer of pages from one group of ranks to another group, which continues the request.

use crate::common::{Request, bits, config, group::of_ranks, loaded, prompt, requests, step, write_config};
use serde_json::json;
use tutti_kernels::{DeviceError, PageId};
use tutti_models::{LoadFormat::Dummy, Model, PlaneStorage};

const PROMPT: usize = 40;
const OUTPUT: usize = 8;

/// Returns a checkpoint with two key heads. In a group of four ranks, each key head is on two ranks.
fn checkpoint(dtype: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(&json!({"vocab_size": 96, "torch_dtype": dtype})));
    dir
}

fn go_on(model: &mut dyn Model, request: &mut Request) {
    while request.tokens.len() < PROMPT + OUTPUT {
        step(model, std::slice::from_mut(request), usize::MAX);
    }
}

/// Prefills a request in chunks, and returns its pages and the request.
fn prefilled(model: &mut dyn Model) -> (Vec<u8>, Request) {
    let prompt: Vec<u32> = prompt(PROMPT).iter().map(|token| token % 96).collect();
    let mut request = requests(&[&prompt]).remove(0);
    while request.tokens.len() == PROMPT {
        step(model, std::slice::from_mut(&mut request), 24);
    }
    let mut pages = Vec::new();
    model.read_pages(&request.pages[..PROMPT.div_ceil(16)], &mut pages).unwrap();
    assert_eq!(pages.len(), PROMPT.div_ceil(16) * model.page_layout().page_bytes());
    (pages, request)
}

#[test]
fn a_group_of_any_size_goes_on_where_another_stopped() {
    for dtype in ["float32", "bfloat16"] {
        let dir = checkpoint(dtype);
        for from in [1, 2, 4] {
            let (pages, request) = of_ranks(from, dir.path(), Dummy, prefilled);
            let whole = of_ranks(from, dir.path(), Dummy, |model| {
                let (_, mut request) = prefilled(model);
                go_on(model, &mut request);
                request.tokens
            });
            for to in [1, 2, 4] {
                of_ranks(to, dir.path(), Dummy, |model| {
                    let mut request = request.clone();
                    // The second group uses different page ids.
                    request.pages.iter_mut().for_each(|page| page.0 -= 100);
                    let own = &request.pages[..PROMPT.div_ceil(16)];
                    model.write_pages(own, &pages).unwrap();
                    let mut back = Vec::new();
                    model.read_pages(own, &mut back).unwrap();
                    assert!(back == pages, "{dtype}, {from} to {to} ranks: other bytes");
                    go_on(model, &mut request);
                    // In bfloat16, sums over a different number of ranks may round differently and give other tokens.
                    if from == to || dtype == "float32" {
                        assert_eq!(request.tokens, whole, "{dtype}, {from} to {to} ranks");
                    }
                });
            }
        }
    }
}

/// Asserts that the loss of any single unit of the pages, which is a KV head of one layer, changes the result. So a
/// hand-over needs to send every unit, and tests notice a hand-over that loses one.
#[test]
fn every_unit_of_the_pages_is_needed() {
    const COMPUTED: usize = 24;
    let hybrid = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 24, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
    });
    for changes in [json!({}), hybrid] {
        let (dir, mut all) =
            (tempfile::tempdir().unwrap(), json!({"vocab_size": 96, "torch_dtype": "float32"}));
        all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        write_config(dir.path(), &config(&all));
        let mut model = loaded(dir.path(), Dummy);
        let prompt: Vec<u32> = prompt(PROMPT).iter().map(|token| token % 96).collect();
        let mut request = requests(&[&prompt]).remove(0);
        while request.computed < COMPUTED {
            step(&mut *model, std::slice::from_mut(&mut request), 8);
        }
        let own = request.pages[..COMPUTED.div_ceil(16)].to_vec();
        let (mut pages, mut state) = (Vec::new(), Vec::new());
        model.read_pages(&own, &mut pages).unwrap();
        model.read_slot(request.slot, &mut state).unwrap();
        let mut outcome_of = |pages: &[u8]| {
            model.write_pages(&own, pages).unwrap();
            model.write_slot(request.slot, &state).unwrap();
            let mut request = request.clone();
            go_on(&mut *model, &mut request);
            bits(&[(request.tokens, request.scores)])
        };
        let whole = outcome_of(&pages);
        let layout = loaded(dir.path(), Dummy).page_layout();
        let (mut first, mut units) = (0, 0);
        for plane in layout.planes.iter().filter(|plane| plane.storage != PlaneStorage::Slot) {
            for bytes in plane.sections.iter().flat_map(|section| vec![section.unit_bytes; section.units]) {
                let mut lost = pages.clone();
                for page in lost.chunks_mut(layout.page_bytes()) {
                    page[first..first + bytes].fill(0);
                }
                assert!(outcome_of(&lost) != whole, "unit {units} of {} is not needed", plane.name);
                (first, units) = (first + bytes, units + 1);
            }
        }
        assert!(first == layout.page_bytes() && units > 1);
        assert!(outcome_of(&pages) == whole);
    }
}

#[test]
fn pages_that_are_not_there_and_bytes_of_another_length_are_refused_by_all_ranks() {
    let dir = checkpoint("float32");
    for ranks in [1, 2] {
        of_ranks(ranks, dir.path(), Dummy, |model| {
            let bytes = vec![0; model.page_layout().page_bytes()];
            let misuse = |outcome| assert!(matches!(outcome, Err(DeviceError::Misuse(_))), "{outcome:?}");
            misuse(model.read_pages(&[PageId(1), PageId(100_000)], &mut Vec::new()));
            misuse(model.write_pages(&[PageId(100_000)], &bytes));
            misuse(model.write_pages(&[PageId(1)], &bytes[1..]));
            // The ranks are still in lockstep.
            let (_, mut request) = prefilled(model);
            go_on(model, &mut request);
        });
    }
}
