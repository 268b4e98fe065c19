//! Tests compressors, the choice of entries and attention over windows and entries against double precision. Also tests
//! that chunks, other rows and threads change no bit, at every boundary of windows, rings and choices.

mod layer;
mod reference;

use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_kernels::{
    Compressed, Device, DeviceError, EntriesShape, IndexerShape, PageId, PagedAttention, PlanesShape,
    RopeFrequencies, Rotary, RotateTails, TailNorm, WeightType,
};

use self::layer::{Case, LAYERS, Layer, Request, Runner, zero};
use crate::support::{Random, Share, assert_near, bits, devices, tensor, try_begin};

/// Sizes of chunks around the boundaries of windows of 4 and of 128 tokens.
const CHUNKS: [usize; 13] = [1, 3, 4, 5, 16, 17, 64, 100, 127, 128, 129, 150, 299];

/// Each kind of layer, in each storage type.
fn cases() -> Vec<Case> {
    let sliding = Case {
        heads: 3,
        head_dim: 24,
        rotated: 8,
        window: 128,
        dtype: WeightType::F32,
        compressor: None,
        indexer: None,
        page_tokens: 128,
    };
    let indexer = IndexerShape { heads: 5, head_dim: 20, top_k: 19 };
    let hca = Case { compressor: Some((128, 1)), heads: 18, head_dim: 32, ..sliding };
    let csa = Case { compressor: Some((4, 2)), indexer: Some(indexer), heads: 5, ..sliding };
    vec![
        sliding,
        hca,
        csa,
        Case { indexer: None, dtype: WeightType::Bf16, ..csa },
        Case { dtype: WeightType::F16, window: 48, page_tokens: 16, ..csa },
        Case { dtype: WeightType::Bf16, ..hca },
        Case { window: 5, head_dim: 16, rotated: 16, heads: 33, dtype: WeightType::Bf16, ..sliding },
        // Windows that do not overlap and windows that do, with other ratios.
        Case { compressor: Some((8, 1)), page_tokens: 64, window: 30, ..hca },
        Case { compressor: Some((16, 2)), page_tokens: 32, window: 100, ..csa },
    ]
}

/// How far results may be from those of double precision, relative to the largest.
fn tolerance(dtype: WeightType) -> f64 {
    // Entries are rounded to their type. All other arithmetic is in f32.
    match dtype {
        WeightType::F32 => 3e-6,
        WeightType::F16 => 6e-4,
        WeightType::Bf16 => 5e-3,
    }
}

#[test]
fn entries_are_those_of_double_precision() {
    for case in cases().into_iter().filter(|case| case.compressor.is_some()) {
        let layer = Layer::new(case);
        for (name, device) in devices("entries") {
            let mut runner = Runner::new(device, &layer);
            let request = Request::new(&layer, 300, 1, 2);
            runner.step(&[(&request, 0, 300)], &[zero(2)]);
            for (plane, width) in layer.entry_widths().into_iter().enumerate() {
                let got = runner.entries(&request, plane, 300);
                let want = reference::entries(&layer, &request, plane, 300);
                let what = format!("{name} {case:?} plane {plane}");
                assert_eq!(got.len() % width, 0, "{what}");
                assert_near(&what, &got, &want, tolerance(case.dtype));
            }
        }
    }
}

#[test]
fn attention_is_that_of_double_precision() {
    for case in cases() {
        let layer = Layer::new(case);
        for tokens in [1, 3, 4, 5, 127, 128, 129, 300] {
            for (name, device) in devices("window attention") {
                let mut runner = Runner::new(device, &layer);
                let request = Request::new(&layer, tokens, 1, 2);
                let got = runner.step(&[(&request, 0, tokens)], &[zero(2)]).remove(0);
                // The reference takes the entries that the device has stored.
                let entries: Vec<Vec<f32>> = (0..layer.entry_widths().len())
                    .map(|plane| runner.entries(&request, plane, tokens))
                    .collect();
                let want = reference::attention(&layer, &request, &entries, tokens);
                assert_near(&format!("{name} {case:?} {tokens}"), &got, &want, 3e-6);
            }
        }
    }
}

/// The state of a request: its outputs, its slot and its pages.
#[derive(PartialEq)]
struct Trace {
    out: Vec<u32>,
    slot: Vec<u8>,
    pages: Vec<u8>,
}

impl Trace {
    fn new(runner: &mut Runner<'_>, request: &Request, out: &[f32]) -> Self {
        Self { out: bits(out), slot: runner.slot(request.slot), pages: runner.pages(request) }
    }

    #[track_caller]
    fn assert_same(&self, other: &Self, what: &str) {
        let first = self.out.iter().zip(&other.out).position(|(a, b)| a != b);
        assert!(self.out == other.out, "{what}: other outputs, first element {first:?}");
        assert!(self.slot == other.slot, "{what}: another slot");
        assert!(self.pages == other.pages, "{what}: other pages");
    }
}

/// Computes the whole request in one chunk, alone on one thread.
fn whole(layer: &Layer, isa: Isa, request: &Request) -> Trace {
    let mut runner = Runner::new(CpuDevice::new(1, isa).unwrap(), layer);
    let out = runner.step(&[(request, 0, request.tokens)], &[zero(request.slot)]).remove(0);
    Trace::new(&mut runner, request, &out)
}

/// Every division into chunks gives the bits of the whole prompt, in the company of a request that decodes and of one
/// that goes on in chunks of another size.
#[test]
fn chunks_of_all_sizes_give_the_bits_of_the_whole() {
    let isa = Isa::detect();
    for case in cases() {
        let layer = Layer::new(case);
        let requests = [(300, 1, 2), (290, 2, 5), (260, 3, 1)]
            .map(|(tokens, seed, slot)| Request::new(&layer, tokens, seed, slot));
        let want: Vec<_> = requests.iter().map(|request| whole(&layer, isa, request)).collect();
        for chunk in CHUNKS {
            let mut runner = Runner::new(CpuDevice::new(2, isa).unwrap(), &layer);
            let (mut done, mut out) = ([0; 3], [vec![], vec![], vec![]]);
            let sizes = [chunk, 1, 7];
            while done[0] < requests[0].tokens {
                let rows: Vec<_> = (0..3)
                    .map(|index| (index, sizes[index].min(requests[index].tokens - done[index])))
                    .filter(|(_, tokens)| *tokens > 0)
                    .collect();
                runner.advance(&requests, &rows, &mut done, &mut out);
            }
            let trace = Trace::new(&mut runner, &requests[0], &out[0]);
            trace.assert_same(&want[0], &format!("{case:?} in chunks of {chunk}"));
            // The others are not done yet.
            for other in 1..3 {
                assert!(bits(&out[other]) == want[other].out[..out[other].len()], "{case:?} beside {chunk}");
            }
        }
    }
}

#[test]
fn random_chunks_on_any_number_of_threads_give_the_bits_of_the_whole() {
    for case in cases() {
        let layer = Layer::new(case);
        let requests = [(300, 1, 4), (129, 2, 3), (257, 3, 1)]
            .map(|(tokens, seed, slot)| Request::new(&layer, tokens, seed, slot));
        let mut random = Random::new(6);
        for isa in Isa::supported() {
            let want: Vec<_> = requests.iter().map(|request| whole(&layer, isa, request)).collect();
            for (threads, longest) in [(1, 2), (3, 9), (2, 40), (2, 200)] {
                let mut runner = Runner::new(CpuDevice::new(threads, isa).unwrap(), &layer);
                let (mut done, mut out) = ([0; 3], [vec![], vec![], vec![]]);
                while (0..3).any(|index| done[index] < requests[index].tokens) {
                    let rows: Vec<_> = (0..3)
                        .map(|index| {
                            let left = requests[index].tokens - done[index];
                            (index, random.below(longest + 1).min(left))
                        })
                        .filter(|(_, tokens)| *tokens > 0)
                        .collect();
                    if !rows.is_empty() {
                        runner.advance(&requests, &rows, &mut done, &mut out);
                    }
                }
                for index in 0..3 {
                    let what = format!("{isa}, {threads} threads, {case:?}, chunks up to {longest}, {index}");
                    Trace::new(&mut runner, &requests[index], &out[index]).assert_same(&want[index], &what);
                }
            }
        }
    }
}

/// A request goes on from its pages and its slot, wherever it stops and whichever slot and pages it has then.
#[test]
fn a_request_goes_on_in_another_slot_and_in_other_pages() {
    let isa = Isa::detect();
    for case in cases() {
        let layer = Layer::new(case);
        let request = Request::new(&layer, 300, 1, 2);
        let want = whole(&layer, isa, &request);
        for stop in [1, 4, 5, 127, 128, 130, 256, 299] {
            let mut first = Runner::new(CpuDevice::new(1, isa).unwrap(), &layer);
            let mut out = first.step(&[(&request, 0, stop)], &[zero(request.slot)]).remove(0);
            let mut moved = Request::new(&layer, 300, 1, 5);
            moved.pages.rotate_left(1);
            let mut second = Runner::new(CpuDevice::new(2, isa).unwrap(), &layer);
            let (slot, pages) = (first.slot(request.slot), first.pages(&request));
            second.restore(&moved, &slot, &pages);
            out.extend(second.step(&[(&moved, stop, 300 - stop)], &[]).remove(0));
            let trace = Trace::new(&mut second, &moved, &out);
            trace.assert_same(&want, &format!("{case:?} stopped behind {stop}"));
        }
    }
}

/// At the end of a page, all windows are closed: of a compressor's states, only that of the closed window's first part
/// holds something.
#[test]
fn at_the_end_of_a_page_open_states_are_zeros() {
    for case in cases() {
        let Some((ratio, parts)) = case.compressor else { continue };
        let layer = Layer::new(case);
        let mut runner = Runner::new(CpuDevice::new(2, Isa::detect()).unwrap(), &layer);
        let request = Request::new(&layer, 300, 1, 2);
        let end = 256;
        assert_eq!(end % case.page_tokens, 0);
        runner.step(&[(&request, 0, end - 3)], &[zero(2)]);
        runner.step(&[(&request, end - 3, 3)], &[]);
        let states = runner.compressor_states(request.slot);
        let (closed, open) = states.split_at(if parts == 2 { 3 * case.head_dim } else { 0 });
        assert_eq!(open.len(), parts * 3 * case.head_dim);
        assert!(open.iter().all(|x| x.to_bits() == 0), "{case:?}, windows of {ratio}");
        assert!(closed.iter().skip(case.head_dim).take(case.head_dim).all(|sum| *sum >= 1.0), "{case:?}");
    }
}

/// Gates far from 0 on either side. A state that is empty counts for nothing, however small the first gate is.
#[test]
fn gates_of_any_size_are_those_of_double_precision() {
    for case in cases().into_iter().filter(|case| case.compressor.is_some()) {
        let layer = Layer::new(case);
        for (name, device) in devices("gates") {
            let mut runner = Runner::new(device, &layer);
            let mut request = Request::new(&layer, 300, 1, 2);
            request.shift_gates(&layer, |token| [-300.0, 250.0, -120.0][token / 120]);
            runner.step(&[(&request, 0, 130)], &[zero(2)]);
            runner.step(&[(&request, 130, 170)], &[]);
            for plane in 0..layer.entry_widths().len() {
                let got = runner.entries(&request, plane, 300);
                let want = reference::entries(&layer, &request, plane, 300);
                // A gate of 300 is rounded to 2^-16, which is an error of its exponential.
                let tolerance = tolerance(case.dtype).max(1e-4);
                assert_near(&format!("{name} {case:?} plane {plane}"), &got, &want, tolerance);
            }
        }
    }
}

/// A layer that attends to the entries with the largest scores, which the test sets.
fn choosing(heads: usize, top_k: usize) -> Case {
    Case {
        heads: 3,
        head_dim: 24,
        rotated: 8,
        window: 16,
        dtype: WeightType::F32,
        compressor: Some((4, 2)),
        indexer: Some(IndexerShape { heads, head_dim: 16, top_k }),
        page_tokens: 128,
    }
}

/// Returns the attention of the token behind `4 * scores.len() - 1` tokens, if the entries have these scores.
fn attention_with_scores(case: Case, scores: &[f32], device: CpuDevice) -> Vec<u32> {
    let layer = Layer::new(case);
    let tokens = 4 * scores.len();
    let mut runner = Runner::new(device, &layer);
    let mut request = Request::new(&layer, tokens + 1, 1, 2);
    let shape = case.indexer.unwrap();
    // The first element of each query is 1, and all others are 0.
    request.set_index_queries(&layer, |element| if element % shape.head_dim == 0 { 1.0 } else { 0.0 });
    request.set_index_weights(&layer, |head| if head == 0 { 1.0 } else { 0.0 });
    runner.step(&[(&request, 0, tokens)], &[zero(2)]);
    runner.set_index_keys(&request, |entry, element| match element {
        0 => scores.get(entry).copied().unwrap_or(f32::NAN),
        _ => 0.0,
    });
    bits(&runner.step(&[(&request, tokens, 1)], &[])[0])
}

/// Only the set of the chosen entries matters: not the order of their scores, and no score if all are taken.
#[test]
fn chosen_entries_are_added_in_order_of_position() {
    const ENTRIES: usize = 40;
    let set = |chosen: &dyn Fn(usize) -> bool, score: &dyn Fn(usize) -> f32| -> Vec<f32> {
        (0..ENTRIES).map(|entry| if chosen(entry) { score(entry) } else { 0.5 }).collect()
    };
    for (name, threads) in [("one thread", 1), ("two threads", 2)] {
        let run = |top_k: usize, scores: &[f32]| {
            let device = CpuDevice::new(threads, Isa::detect()).unwrap();
            attention_with_scores(choosing(2, top_k), scores, device)
        };
        let chosen = |entry: usize| entry % 4 != 1;
        let ascending = run(30, &set(&chosen, &|entry| 1.0 + entry as f32));
        let descending = run(30, &set(&chosen, &|entry| 100.0 - entry as f32));
        let mixed = run(30, &set(&chosen, &|entry| 1.0 + (entry * 7 % ENTRIES) as f32));
        assert!(ascending == descending && ascending == mixed, "{name}");
        let others = run(30, &set(&|entry| entry % 4 != 2, &|entry| 1.0 + entry as f32));
        assert!(ascending != others, "{name}: other entries, the same bits");
        // With as many as are visible or more, all are taken.
        let all = run(ENTRIES, &set(&chosen, &|entry| entry as f32));
        assert!(all == run(ENTRIES, &set(&chosen, &|entry| -(entry as f32))), "{name}");
        assert!(all == run(ENTRIES + 1, &set(&chosen, &|_| f32::NAN)), "{name}");
        assert!(all != run(ENTRIES - 1, &set(&chosen, &|entry| entry as f32)), "{name}: all of one less");
    }
}

/// Of equal scores, the lower index wins. Scores of 0 and of -0 are equal.
#[test]
fn of_equal_scores_the_lower_index_wins() {
    const ENTRIES: usize = 700;
    // So many entries are scored in several ranges.
    let run = |scores: &dyn Fn(usize) -> f32, threads: usize| {
        let scores: Vec<f32> = (0..ENTRIES).map(scores).collect();
        let device = CpuDevice::new(threads, Isa::detect()).unwrap();
        attention_with_scores(choosing(2, 20), &scores, device)
    };
    for (equal, lower, upper) in [(0.0, -1.0, 0.5), (2.5, 0.5, 3.0)] {
        // The query's product is positive, so a score below 0 counts as 0.
        let lower = if equal == 0.0 { 0.0 } else { lower };
        for threads in [1, 2, 3] {
            // Entries 100 to 299 are equal, and the first twenty of them are to be chosen.
            let tied = run(&|entry| if (100..300).contains(&entry) { equal + 1.0 } else { lower }, threads);
            let set = run(&|entry| if (100..120).contains(&entry) { upper + 1.0 } else { lower }, 1);
            assert!(tied == set, "{threads} threads, equal scores of {equal}");
            // A larger score than those comes first, wherever it is.
            let tied = run(
                &|entry| match entry {
                    650 | 3 => upper + 2.0,
                    100..300 => equal + 1.0,
                    _ => lower,
                },
                threads,
            );
            let set = run(
                &|entry| if [3, 650].contains(&entry) || (100..118).contains(&entry) { 9.0 } else { 0.1 },
                1,
            );
            assert!(tied == set, "{threads} threads, beside two larger ones");
        }
    }
    let none = run(&|_| -3.0, 2);
    let set = run(&|entry| if entry < 20 { 1.0 } else { 0.0 }, 1);
    assert!(none == set, "without a positive product, all scores are 0");
}

/// Rows of padding have the null slot. They give zeros, and change neither pages nor slots nor another row.
#[test]
fn rows_of_padding_change_nothing() {
    for case in cases() {
        let layer = Layer::new(case);
        let request = Request::new(&layer, 140, 1, 3);
        let padding = Request { slot: 0, pages: vec![PageId::NULL; 12], ..Request::new(&layer, 140, 2, 1) };
        for (name, device) in devices("padding") {
            let mut alone = Runner::new(CpuDevice::new(1, Isa::Portable).unwrap(), &layer);
            let untouched = alone.everything();
            let mut runner = Runner::new(device, &layer);
            let out = runner.step(&[(&padding, 0, 140)], &[]).remove(0);
            assert!(out.iter().all(|x| x.to_bits() == 0), "{name} {case:?}");
            assert!(runner.everything() == untouched, "{name} {case:?}: padding was stored");
            // Any position and any number of rows.
            let rows = [(&padding, 127, 1), (&request, 0, 139), (&padding, 0, 5), (&padding, 3, 1)];
            let out = runner.step(&rows, &[zero(3)]).remove(1);
            let mut other = Runner::new(CpuDevice::new(1, runner.isa()).unwrap(), &layer);
            let want = other.step(&[(&request, 0, 139)], &[zero(3)]).remove(0);
            assert!(bits(&out) == bits(&want), "{name} {case:?}");
            assert!(runner.everything() == other.everything(), "{name} {case:?}: state");
        }
    }
}

/// Heads are normalised and rotated as in double precision, and the inverse rotation takes the rotation back.
#[test]
fn tails_are_those_of_double_precision() {
    const TOKENS: usize = 4;
    for (heads, head_dim, rotated) in [(3, 24, 8), (2, 64, 64), (5, 17, 6), (1, 40, 2)] {
        let rope = RopeFrequencies {
            inverse: (0..rotated / 2).map(|i| 1e3f32.powf(-2.0 * i as f32 / rotated as f32)).collect(),
            scale: 1.0,
            axes: vec![],
        };
        let values = Random::new(4).normals(TOKENS * heads * head_dim, 2.0);
        let weights = Random::new(5).normals(head_dim, 1.0);
        for (name, mut device) in devices("tails") {
            let mut planes = device.planes(&PlanesShape::default()).unwrap();
            let share = Share { tokens: TOKENS, start: 77, ..Share::default() };
            try_begin(&mut device, &mut planes, &[share], &[], &[]).unwrap();
            let mut angles = device.tensor(TOKENS, rotated).unwrap();
            device.rope_angles(&rope, &mut angles).unwrap();
            let weight = device.vector(&weights).unwrap();
            for (kind, inverse) in [(0, false), (1, false), (2, false), (0, true), (1, true)] {
                let norm = match kind {
                    0 => TailNorm::None,
                    1 => TailNorm::Unweighted { eps: 1e-6 },
                    _ => TailNorm::Weighted(tutti_kernels::Norm { weight: &weight, eps: 1e-6 }),
                };
                let mut want = Vec::new();
                for (index, head) in values.chunks(head_dim).enumerate() {
                    let mut head: Vec<f64> = head.iter().map(|&x| x.into()).collect();
                    let mean = head.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
                    if kind > 0 {
                        head.iter_mut().for_each(|x| *x /= (mean + 1e-6).sqrt());
                    }
                    if kind > 1 {
                        head.iter_mut().zip(&weights).for_each(|(x, w)| *x *= f64::from(*w));
                    }
                    let position = (77 + index / heads) as f64 * if inverse { -1.0 } else { 1.0 };
                    reference::rotate(&mut head, position, &rope);
                    want.extend(head);
                }
                let mut x = tensor(&mut device, heads * head_dim, &values);
                let rotary = Rotary { angles: &angles };
                device.rotate_tails(RotateTails { x: &mut x, head_dim, norm, rotary, inverse }).unwrap();
                assert_near(&format!("{name} {heads} {head_dim} {kind} {inverse}"), x.values(), &want, 1e-5);
            }
            let mut x = tensor(&mut device, heads * head_dim, &values);
            for inverse in [false, true] {
                let (norm, rotary) = (TailNorm::None, Rotary { angles: &angles });
                device.rotate_tails(RotateTails { x: &mut x, head_dim, norm, rotary, inverse }).unwrap();
            }
            assert_near(&format!("{name} {heads} back"), x.values(), &values, 1e-6);
        }
    }
}

/// A page's bytes are those of the planes in order, and within a plane those of the layers in order.
#[test]
fn pages_hold_plane_after_plane_and_layer_after_layer() {
    let shape =
        |layers, width, ratio, dtype| EntriesShape { layers, width, ratio, page_tokens: 16, pages: 4, dtype };
    let entries = vec![shape(2, 3, 4, WeightType::F32), shape(3, 5, 16, WeightType::Bf16)];
    let sizes: Vec<usize> = entries.iter().map(EntriesShape::page_bytes).collect();
    assert_eq!(sizes, [2 * 4 * 3 * 4, 3 * 5 * 2]);
    let mut device = CpuDevice::new(2, Isa::detect()).unwrap().with_resident_planes(true);
    let kv = tutti_kernels::KvShape {
        layers: 1,
        kv_heads: 1,
        head_dim: 16,
        page_tokens: 16,
        pages: 4,
        dtype: tutti_kernels::KvType::Full(WeightType::Bf16),
    };
    for kv in [None, Some(kv)] {
        let shape = PlanesShape { kv, entries: entries.clone(), ..PlanesShape::default() };
        let mut planes = device.planes(&shape).unwrap();
        let bytes = kv.map_or(0, |kv| kv.page_bytes()) + sizes.iter().sum::<usize>();
        let pages: Vec<u8> = (0..3 * bytes).map(|index| (index % 251) as u8).collect();
        device.write_pages(&mut planes, &[PageId(3), PageId(1), PageId(2)], &pages).unwrap();
        let mut back = Vec::new();
        device.read_pages(&planes, &[PageId(2), PageId(3)], &mut back).unwrap();
        assert_eq!(back[..bytes], pages[2 * bytes..]);
        assert_eq!(back[bytes..], pages[..bytes]);
        let misuse = |result| assert!(matches!(result, Err(DeviceError::Misuse(_))), "{result:?}");
        misuse(device.read_pages(&planes, &[PageId(4)], &mut back));
        misuse(device.write_pages(&mut planes, &[PageId(1)], &pages[..bytes - 1]));
        // Block tables are checked in a model without keys and values, too.
        let row = |tokens: usize, pages: &[u32]| Share {
            tokens,
            pages: pages.iter().map(|&page| PageId(page)).collect(),
            ..Share::default()
        };
        try_begin(&mut device, &mut planes, &[row(17, &[1, 2])], &[], &[]).unwrap();
        for rows in [vec![row(17, &[1])], vec![row(17, &[1, 4])], vec![row(1, &[1]), row(1, &[1])]] {
            misuse(try_begin(&mut device, &mut planes, &rows, &[], &[]));
        }
    }
    let mut refused = |shape: PlanesShape| device.planes(&shape).err().unwrap();
    let with = |entries: EntriesShape| PlanesShape {
        kv: Some(kv),
        entries: vec![entries],
        ..PlanesShape::default()
    };
    let good = entries[0];
    assert!(matches!(refused(with(EntriesShape { pages: 5, ..good })), DeviceError::Misuse(_)));
    assert!(matches!(refused(with(EntriesShape { page_tokens: 32, ..good })), DeviceError::Misuse(_)));
    assert!(matches!(refused(with(EntriesShape { ratio: 5, ..good })), DeviceError::Unsupported(_)));
    assert!(matches!(refused(with(EntriesShape { width: 0, ..good })), DeviceError::Unsupported(_)));
}

/// Operands that contradict each other or the planes are refused, and the device goes on.
#[test]
fn operands_that_do_not_fit_are_refused() {
    let layer = Layer::new(cases().remove(2));
    let request = Request::new(&layer, 6, 1, 2);
    let mut runner = Runner::new(CpuDevice::new(1, Isa::detect()).unwrap(), &layer);
    runner.step(&[(&request, 0, 6)], &[zero(2)]);
    type Change = fn(&mut layer::Operations);
    let changes: [(&str, Change); 16] = [
        ("a layer that the planes lack", |operations| operations.layer = LAYERS),
        ("a plane of entries that is missing", |operations| operations.entries = 2),
        ("entries of the indexer", |operations| operations.entries = 1),
        ("a slot plane that is missing", |operations| operations.states = 7),
        ("states of the indexer", |operations| operations.states = 2),
        ("three parts", |operations| operations.compressor.parts = 3),
        ("another ratio", |operations| operations.compressor.ratio = 8),
        ("a wider entry", |operations| operations.compressor.width += 1),
        ("more rotated elements than there are", |operations| operations.rope.inverse = vec![1.0; 13]),
        ("no window", |operations| operations.window.window = 0),
        ("a longer window", |operations| operations.window.window += 1),
        ("more heads", |operations| operations.window.heads += 1),
        ("other heads", |operations| operations.window.head_dim += 1),
        ("none chosen", |operations| operations.indexer.top_k = 0),
        ("more heads of the indexer", |operations| operations.indexer.heads += 1),
        ("other heads of the indexer", |operations| operations.indexer.head_dim += 1),
    ];
    for (what, change) in changes {
        let mut operations = runner.operations();
        change(&mut operations);
        let refused = runner.try_step(&[(&request, 0, 6)], &[zero(2)], &operations);
        assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{what}: {refused:?}");
    }
    let operations = runner.operations();
    runner.try_step(&[(&request, 0, 6)], &[zero(2)], &operations).unwrap();
}
