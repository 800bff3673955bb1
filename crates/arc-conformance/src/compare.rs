//! Comparing what two devices computed.

use crate::suite::Verdict;

/// The same bits everywhere; NaN equals NaN of the same bits.
pub fn equal_bits(want: &[f32], got: &[f32]) -> Verdict {
    if want.len() != got.len() {
        return Err(format!("{} values, {} wanted", got.len(), want.len()));
    }
    let wrong = want.iter().zip(got).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    match want.iter().zip(got).position(|(a, b)| a.to_bits() != b.to_bits()) {
        None => Ok(format!("{} values", want.len())),
        Some(at) => {
            Err(format!("{wrong} of {} differ, first at {at}: {:e} wanted, {:e}", want.len(), want[at], got[at]))
        }
    }
}

/// The same bits everywhere, and a NaN where there is one: processors disagree about the bits of a NaN.
pub fn equal_or_nan(want: &[f32], got: &[f32]) -> Verdict {
    let canon = |x: &f32| if x.is_nan() { f32::NAN } else { *x };
    let canon = |values: &[f32]| values.iter().map(canon).collect::<Vec<_>>();
    equal_bits(&canon(want), &canon(got))
}

/// The same values of any kind.
pub fn equal<T: PartialEq + std::fmt::Debug>(want: &[T], got: &[T]) -> Verdict {
    if want.len() != got.len() {
        return Err(format!("{} values, {} wanted", got.len(), want.len()));
    }
    match want.iter().zip(got).position(|(a, b)| a != b) {
        None => Ok(format!("{} values", want.len())),
        Some(at) => Err(format!("first difference at {at} of {}: {:?} wanted, {:?}", want.len(), want[at], got[at])),
    }
}

/// `|want - got| <= abs + rel * |want|` everywhere; NaN positions must agree.
pub fn within(want: &[f32], got: &[f32], abs: f32, rel: f32) -> Verdict {
    if want.len() != got.len() {
        return Err(format!("{} values, {} wanted", got.len(), want.len()));
    }
    let (mut worst, mut at) = (0.0, 0);
    for (i, (&a, &b)) in want.iter().zip(got).enumerate() {
        if a.is_nan() || b.is_nan() {
            if a.is_nan() != b.is_nan() {
                return Err(format!("at {i}: {a:e} wanted, {b:e}"));
            }
            continue;
        }
        if a == b {
            continue;
        }
        let share = (a - b).abs() / (abs + rel * a.abs());
        if share > worst || share.is_nan() {
            (worst, at) = (if share.is_nan() { f32::INFINITY } else { share }, i);
        }
    }
    let text = format!("largest error {worst:.3} of the bound, at {at}: {:e} wanted, {:e}", want[at], got[at]);
    if worst <= 1.0 { Ok(text) } else { Err(text) }
}

/// Of the kernels that a step launched, those whose names begin so are these, in this order: that a launch stands for several
/// does not show in what it leaves, and neither does that it no longer comes about.
pub fn launches(of: &str, want: &[&str], launched: &[&str]) -> Verdict {
    let got: Vec<&str> = launched.iter().copied().filter(|name| name.starts_with(of)).collect();
    if got == want { Ok(got.join(" ")) } else { Err(format!("launches {got:?}, not {want:?}")) }
}

/// All of several verdicts; the first failure, or the last remark.
pub fn all(verdicts: impl IntoIterator<Item = Verdict>) -> Verdict {
    let mut last = String::new();
    for verdict in verdicts {
        last = verdict?;
    }
    Ok(last)
}
