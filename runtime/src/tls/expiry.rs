//! The end of a certificate's validity, read from its DER form (RFC 5280, section 4.1).

/// Tags of DER.
const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// Unix time in seconds after which the certificate is not valid. `None` if the bytes are no certificate.
pub(super) fn not_after(certificate: &[u8]) -> Option<i64> {
    let mut outer = certificate;
    let mut certificate = expect(&mut outer, SEQUENCE)?;
    let mut signed = expect(&mut certificate, SEQUENCE)?;
    if signed.first() == Some(&VERSION) {
        element(&mut signed)?;
    }
    // Skips serial number, algorithm and issuer.
    for _ in 0..3 {
        element(&mut signed)?;
    }
    let mut validity = expect(&mut signed, SEQUENCE)?;
    element(&mut validity)?;
    let (tag, text) = element(&mut validity)?;
    time(tag, std::str::from_utf8(text).ok()?)
}

/// Takes one DER element from `rest`. Returns its tag and its content.
fn element<'a>(rest: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (&tag, after) = rest.split_first()?;
    let (&first, mut after) = after.split_first()?;
    let mut length = usize::from(first);
    if first >= 0x80 {
        let (bytes, more) =
            after.split_at_checked(usize::from(first - 0x80)).filter(|(b, _)| b.len() <= 4)?;
        length = bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
        after = more;
    }
    let (content, more) = after.split_at_checked(length)?;
    *rest = more;
    Some((tag, content))
}

fn expect<'a>(rest: &mut &'a [u8], wanted: u8) -> Option<&'a [u8]> {
    element(rest).filter(|(tag, _)| *tag == wanted).map(|(_, content)| content)
}

/// Unix time in seconds of a time in UTC: `YYMMDDHHMMSSZ`, or `YYYYMMDDHHMMSSZ` for [`GENERALIZED_TIME`].
fn time(tag: u8, text: &str) -> Option<i64> {
    let (year, rest) = match tag {
        UTC_TIME => {
            let year: i64 = text.get(..2)?.parse().ok()?;
            (if year < 50 { 2000 + year } else { 1900 + year }, text.get(2..)?)
        }
        GENERALIZED_TIME => (text.get(..4)?.parse().ok()?, text.get(4..)?),
        _ => return None,
    };
    let part = |at: usize| rest.get(at..at + 2)?.parse::<i64>().ok();
    let [month, day, hour, minute, second] = [part(0)?, part(2)?, part(4)?, part(6)?, part(8)?];
    if rest.get(10..) != Some("Z") || !(1..=12).contains(&month) {
        return None;
    }
    Some(((days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second)
}

/// Days from 1970-01-01 to a day of the Gregorian calendar. The computation begins each year in March, so that a leap
/// day is the year's last day.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + of_year - 719_468
}

#[cfg(test)]
mod tests;
