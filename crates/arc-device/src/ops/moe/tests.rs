use super::{assign, clamped_silu};

#[test]
fn assignments_are_sorted_by_expert_then_row() {
    let ids = [0, 2, 1, 2, 0, 3, 2, 2];
    let (mut order, mut bounds) = ([u32::MAX; 8], [7; 5]);
    assign(&mut order, &mut bounds, &ids, 2, |_| true);
    assert_eq!(bounds, [0, 2, 3, 7, 8]);
    assert_eq!(order, [0, 4, 2, 1, 3, 6, 7, 5]);
    let mut order = [u32::MAX; 8];
    assign(&mut order, &mut bounds, &ids, 2, |row| row != 1 && row != 3);
    assert_eq!((bounds, &order[..4]), ([0, 2, 2, 3, 4], &[0, 4, 1, 5][..]));
    assign(&mut order, &mut bounds, &[], 2, |_| true);
    assert_eq!(bounds, [0; 5]);
}

#[test]
fn the_gate_is_clamped_from_above_only() {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let mut seen = 0;
    for (gate, up) in [(5.0, 0.5), (-5.0, 0.5), (1.0, 9.0), (1.0, -9.0), (-9.0, -9.0), (0.3, 0.2)] {
        let mut out = [gate];
        clamped_silu(&mut out, &[up], 2.0);
        let (g, u) = (f64::from(gate), f64::from(up).clamp(-2.0, 2.0));
        let want = silu(g.min(2.0)) * u;
        assert!((f64::from(out[0]) - want).abs() < 1e-6, "{gate} {up}: {} {want}", out[0]);
        // What clamping on both sides would give.
        seen += usize::from((f64::from(out[0]) - silu(g.clamp(-2.0, 2.0)) * u).abs() > 1e-2);
    }
    assert_eq!(seen, 2, "the deliberately wrong clamp differs where the gate is far below");
    let mut out = [f32::NAN, 1.0];
    clamped_silu(&mut out, &[1.0, f32::NAN], 2.0);
    assert!(out.iter().all(|x| x.is_nan()), "a NaN passes");
}
