//! Conversion between wanted logit rows and plan messages.

mod masks;

use tutti_kernels::{Adjustments, Nomination, TokenMask};
use tutti_proto::cluster::v1 as pb;

use self::masks::Masks;
use crate::WantedRows;

/// Encodes the rows that the leader's requests need.
pub(super) fn encode(wanted: WantedRows) -> pb::LogitsPlan {
    let WantedRows { rows, likeliest, nominated } = wanted;
    let indices = |rows: Vec<usize>| rows.into_iter().map(|row| row as u32).collect();
    let mut masks = Masks::default();
    let nominated_row = |(row, nomination): (usize, Nomination)| {
        let Nomination { count, temperature, adjustments } = nomination;
        let adjustments = adjustments.map(|adjustments| encode_adjustments(adjustments, &mut masks));
        pb::NominatedRow { row: row as u32, count, temperature, adjustments }
    };
    pb::LogitsPlan {
        rows: indices(rows),
        likeliest: indices(likeliest),
        nominated: nominated.into_iter().map(nominated_row).collect(),
        masks: masks.encode(),
    }
}

/// Decodes rows that [`encode`] has encoded, for a vocabulary of this many tokens. Returns the reason if the message is
/// not valid.
pub(super) fn decode(plan: pb::LogitsPlan, vocabulary: usize) -> Result<WantedRows, String> {
    let indices = |rows: Vec<u32>| rows.into_iter().map(|row| row as usize).collect();
    let masks = plan.masks.into_iter().map(masks::decode).collect::<Result<Vec<TokenMask>, String>>()?;
    // The kernels read the words of every token.
    let needed = TokenMask::words_of(vocabulary);
    if let Some(words) = masks.iter().map(|mask| mask.words().len()).find(|words| *words != needed) {
        return Err(format!("a mask of {words} words for a vocabulary of {vocabulary}"));
    }
    let nominated_row = |message: pb::NominatedRow| {
        let pb::NominatedRow { row, count, temperature, adjustments } = message;
        if count == 0 {
            return Err(format!("row {row} nominates no token"));
        }
        let adjustments = adjustments.map(|message| decode_adjustments(message, &masks)).transpose()?;
        Ok((row as usize, Nomination { count, temperature, adjustments }))
    };
    Ok(WantedRows {
        rows: indices(plan.rows),
        likeliest: indices(plan.likeliest),
        nominated: plan.nominated.into_iter().map(nominated_row).collect::<Result<_, String>>()?,
    })
}

fn encode_adjustments(adjustments: Adjustments, masks: &mut Masks) -> pb::Adjustments {
    let (biased, biases) = adjustments.bias.into_iter().unzip();
    let (counted, counts) = adjustments.counted.into_iter().unzip();
    pb::Adjustments {
        biased,
        biases,
        forbidden: adjustments.forbidden,
        repetition_penalty: adjustments.repetition_penalty,
        repeated_tokens: adjustments.repeated,
        presence_penalty: adjustments.presence_penalty,
        frequency_penalty: adjustments.frequency_penalty,
        counted,
        counts,
        mask: adjustments.allowed.map(|mask| masks.index(mask)),
    }
}

fn decode_adjustments(message: pb::Adjustments, masks: &[TokenMask]) -> Result<Adjustments, String> {
    let pb::Adjustments { biased, biases, counted, counts, .. } = message;
    if biased.len() != biases.len() || counted.len() != counts.len() {
        let (tokens, values) = (biased.len() + counted.len(), biases.len() + counts.len());
        return Err(format!("adjustments of {tokens} tokens with {values} values"));
    }
    let mask = |index: u32| {
        let mask = masks.get(index as usize).cloned();
        mask.ok_or_else(|| format!("mask {index} of {}", masks.len()))
    };
    Ok(Adjustments {
        allowed: message.mask.map(mask).transpose()?,
        bias: biased.into_iter().zip(biases).collect(),
        forbidden: message.forbidden,
        repetition_penalty: message.repetition_penalty,
        repeated: message.repeated_tokens,
        presence_penalty: message.presence_penalty,
        frequency_penalty: message.frequency_penalty,
        counted: counted.into_iter().zip(counts).collect(),
    })
}

#[cfg(test)]
mod tests;
