//! Tests of the test model with an audio encoder. The embeddings and the results depend neither on the worker that
//! encodes nor on the prompt's chunks.

use std::path::Path;

use crate::common::{
    Bits, MAX_STEP_TOKENS, Media, PAGE_TOKENS, PAGES, bits as bits_of, config, device, generate_with, loaded,
    prompt, try_load as try_load_of, write_config,
};
use serde_json::json;
use tutti_kernels::{PageId, RowInputs, ScoreRow, SlotId, StepInputs};
use tutti_models::{
    EmbeddedRows, EncoderItem, LoadError, LoadFormat, LoadOptions, LogitRequests, LogitResults, Model, load,
};
use tutti_proto::declaration::WalkId;

const PLACEHOLDER: u32 = 90;
const BYTES_PER_TOKEN: usize = 10;
const WIDTH: usize = 48;

fn try_load(dir: &Path, nodes: Option<&[&str]>) -> Result<Box<dyn Model>, LoadError> {
    let nodes = nodes.map(|nodes| nodes.iter().map(|&node| node.to_owned()).collect());
    let (load_format, page_tokens) = (LoadFormat::Dummy, PAGE_TOKENS);
    let options = LoadOptions {
        kv_cache_dtype: tutti_models::KvCacheDtype::Auto,
        dir: dir.into(),
        load_format,
        max_step_tokens: MAX_STEP_TOKENS,
        page_tokens,
        expert_parallel: false,
        nodes,
        seed: 11,
        quantize: tutti_kernels::Quantize::None,
    };
    let mut model = load(&options, device(), &mut |_| {})?;
    model.allocate_planes(PAGES, 1).unwrap();
    Ok(model)
}

fn checkpoint(changes: &serde_json::Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut keys = json!({"architectures": ["TuttiMediaTestForCausalLM"], "model_type": "tutti_media_test",
        "audio_token_id": PLACEHOLDER, "audio_bytes_per_token": BYTES_PER_TOKEN});
    for (key, change) in changes.as_object().unwrap() {
        keys[key] = change.clone();
    }
    write_config(dir.path(), &config(&keys));
    dir
}

fn walk(model: &dyn Model) -> WalkId {
    model.declaration().media()[0].walk
}

fn encoded(model: &mut dyn Model, data: &[u8]) -> Vec<f32> {
    let mut out = vec![];
    model.encode(walk(model), &[data.into()], None, &mut out).unwrap();
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns the logprobs of the whole vocabulary after each token of a prompt that runs in chunks. The second to
/// eleventh tokens stand for a media item.
fn scores(model: &mut dyn Model, embeddings: &[f32], chunk: usize) -> Vec<Vec<(u32, u32)>> {
    let prompt: Vec<u32> =
        (0..40).map(|index| if (1..11).contains(&index) { PLACEHOLDER } else { index * 2 }).collect();
    let pages = [PageId(3), PageId(9), PageId(1)];
    let mut scores = Vec::new();
    for start in (0..prompt.len()).step_by(chunk) {
        let end = prompt.len().min(start + chunk);
        let row = RowInputs {
            first_token: 0,
            tokens: end - start,
            start,
            slot: SlotId::NULL,
            continues: false,
            block_table: &pages,
        };
        let positions: Vec<f32> = (start..end).map(|position| position as f32).collect();
        let logit_rows: Vec<usize> = (0..end - start).collect();
        let rows = [row];
        let inputs = StepInputs {
            token_ids: &prompt[start..end],
            positions: [&positions[..]; 3],
            rows: &rows,
            copies: &[],
            logit_rows: &logit_rows,
            shape: None,
        };
        let (from, to) = (start.max(1), end.min(11));
        let embedded = (from < to).then(|| EmbeddedRows {
            first_token: from - start,
            width: WIDTH,
            values: &embeddings[(from - 1) * WIDTH..(to - 1) * WIDTH],
        });
        model.forward(&inputs, embedded.as_slice()).unwrap();
        let wanted: Vec<_> = logit_rows.iter().map(|&row| (row, ScoreRow { token: 0, top: 97 })).collect();
        let mut out = LogitResults::default();
        model.read_logits(&LogitRequests { sample: &[], score: &wanted }, &mut out).unwrap();
        let bits = |top: Vec<(u32, f32)>| top.into_iter().map(|(token, p)| (token, p.to_bits())).collect();
        scores.extend(out.scores.into_iter().map(|score| bits(score.unwrap().top)));
    }
    scores
}

#[test]
fn neither_where_it_is_encoded_nor_how_the_prompt_is_cut_changes_a_bit() {
    let dir = checkpoint(&json!({}));
    let (mut whole, mut encoder) =
        (try_load(dir.path(), None).unwrap(), try_load(dir.path(), Some(&["audio_encoder"])).unwrap());
    let mut thinker = try_load(dir.path(), Some(&["thinker"])).unwrap();
    assert!(!encoder.has_thinker() && thinker.has_thinker() && whole.has_thinker());
    assert_eq!(whole.weight_bytes(), encoder.weight_bytes() + thinker.weight_bytes());
    assert_eq!(whole.page_layout(), thinker.page_layout());
    assert!(thinker.encode(walk(&*whole), &[(&[0; 10][..]).into()], None, &mut vec![]).is_err());
    let data: Vec<u8> = (0..10 * BYTES_PER_TOKEN as u32 - 3).map(|byte| (byte * 37 % 251) as u8).collect();
    let embeddings = encoded(&mut *whole, &data);
    assert_eq!(embeddings.len(), 10 * WIDTH);
    assert_eq!(bits(&encoded(&mut *encoder, &data)), bits(&embeddings));

    let expected = scores(&mut *whole, &embeddings, 40);
    for chunk in [1, 3, 7, 16, 39] {
        assert!(scores(&mut *thinker, &embeddings, chunk) == expected, "chunks of {chunk}");
    }
    let other = encoded(&mut *encoder, &data[1..]);
    let changed = scores(&mut *thinker, &[&other[..], &[0.0; WIDTH]].concat()[..10 * WIDTH], 40);
    assert!(changed[0] == expected[0] && changed[1] != expected[1] && changed[39] != expected[39]);
}

#[test]
fn an_item_is_encoded_as_a_whole() {
    let dir = checkpoint(&json!({}));
    let mut encoder = try_load(dir.path(), Some(&["audio_encoder"])).unwrap();
    // The item is longer than one tile of frames.
    let mut data = vec![1; 200 * BYTES_PER_TOKEN];
    let quiet = encoded(&mut *encoder, &data);
    data[1999] = 0x70;
    let loud = encoded(&mut *encoder, &data);
    assert_ne!(bits(&quiet[..WIDTH]), bits(&loud[..WIDTH]), "the last sample is the loudest");
    assert!(encoder.encode(walk(&*encoder), &[(&[][..]).into()], None, &mut vec![]).is_err());
}

#[test]
fn items_that_are_encoded_together_depend_on_each_other() {
    let keys = json!({"audio_encoded_together": true, "audio_max_call_tokens": 6});
    let dir = checkpoint(&keys);
    let mut encoder = try_load(dir.path(), Some(&["audio_encoder"])).unwrap();
    let declared = encoder.declaration().media()[0].clone();
    assert_eq!((declared.encoded_together, declared.max_call_tokens), (true, Some(6)));
    let walk = walk(&*encoder);
    let mut call = |items: &[&[u8]]| {
        let mut out = vec![];
        let items: Vec<EncoderItem<'_>> = items.iter().map(|&data| data.into()).collect();
        encoder.encode(walk, &items, None, &mut out).unwrap();
        bits(&out)
    };
    let (first, second) = ([3; 2 * BYTES_PER_TOKEN], [9; BYTES_PER_TOKEN - 1]);
    let both = call(&[&first, &second]);
    assert_eq!(both.len(), 3 * WIDTH);
    assert_ne!(both[..2 * WIDTH], call(&[&first]));
    assert_ne!(both[2 * WIDTH..], call(&[&second]));
    assert_ne!(
        both[..2 * WIDTH],
        call(&[&first, &[9; BYTES_PER_TOKEN - 1], &[1]])[..2 * WIDTH],
        "the count matters"
    );
    assert!(encoder.encode(walk, &[(&first[..]).into(), (&[][..]).into()], None, &mut vec![]).is_err());
}

#[test]
fn a_config_that_makes_no_sense_is_reported_by_its_key() {
    for (changes, expected) in [
        (json!({"audio_token_id": 97}), "audio_token_id: 97 is not below vocab_size, 97"),
        (json!({"audio_bytes_per_token": 7}), "audio_bytes_per_token: 7 bytes"),
        (json!({"audio_bytes_per_token": 0}), "audio_bytes_per_token: 0 bytes"),
        (json!({"audio_token_id": null}), "audio_token_id"),
        (json!({"audio_max_call_tokens": 0}), "takes no tokens"),
    ] {
        let error = try_load(checkpoint(&changes).path(), None).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Returns the logprobs after each token of a prompt with a picture in the middle, whose rows have two levels of
/// features behind their embeddings.
fn with_features(model: &mut dyn Model, features: [f32; 2], chunk: usize) -> Vec<Bits> {
    let wave = |index: usize, factor: f32| ((index * 37 % 61) as f32 / 61.0 - 0.5) * factor;
    let row = |token: usize| {
        let part =
            move |(level, factor)| (0..WIDTH).map(move |index| wave(index + 7 * token + 3 * level, factor));
        [1.0, features[0], features[1]].into_iter().enumerate().flat_map(part)
    };
    let media = Media { rows: vec![(4..17, 3 * WIDTH, (0..13).flat_map(row).collect())], ..Media::default() };
    bits_of(&generate_with(model, &[&prompt(30)], &[&media], chunk, 4))
}

#[test]
fn features_of_pictures_are_added_level_by_level_whatever_the_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let text =
        json!({"rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default"}, "num_hidden_layers": 4});
    let top = json!({"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": config(&text),
                     "vision_config": {"deepstack_visual_indexes": [0, 1]}});
    write_config(dir.path(), &top);
    let mut model = loaded(dir.path(), LoadFormat::Dummy);
    let whole = with_features(&mut *model, [0.5, 0.25], usize::MAX);
    for chunk in [1, 3, 5, 16] {
        assert!(with_features(&mut *model, [0.5, 0.25], chunk) == whole, "chunks of {chunk}");
    }
    for other in [[0.0, 0.25], [0.5, 0.0], [0.25, 0.5]] {
        assert!(with_features(&mut *model, other, usize::MAX) != whole, "{other:?} in place of the features");
    }
    // Rows with more levels than the model has are refused, and so are rows that are not whole.
    let inputs = StepInputs {
        token_ids: &[1, 2],
        positions: [&[0.0, 1.0]; 3],
        rows: &[],
        copies: &[],
        logit_rows: &[],
        shape: None,
    };
    for (width, count) in
        [(4 * WIDTH, 4 * WIDTH), (WIDTH + 1, WIDTH + 1), (3 * WIDTH, WIDTH), (WIDTH, 3 * WIDTH), (0, 0)]
    {
        let rows = EmbeddedRows { first_token: 0, width, values: &vec![0.0; count] };
        let error = model.forward(&inputs, &[rows]).unwrap_err().to_string();
        assert!(error.contains(&format!("{count} values in rows of {width}")), "{error}");
    }
    let as_many = json!({"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": config(&text),
                         "vision_config": {"deepstack_visual_indexes": [0, 1, 2, 3]}});
    write_config(dir.path(), &as_many);
    let error = try_load_of(dir.path(), LoadFormat::Dummy).err().unwrap().to_string();
    assert!(error.contains("vision_config.deepstack_visual_indexes: has 4 entries"), "{error}");
}
