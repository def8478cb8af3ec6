//! Axes: scale, range, and ticks at round numbers.

/// How values are placed on an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    Linear,
    Logarithmic,
}

#[derive(Clone, Debug)]
pub(super) struct Axis {
    /// Quantity and unit.
    pub(super) label: String,
    scale: Scale,
    first: f64,
    last: f64,
    /// Values with their labels.
    pub(super) ticks: Vec<(f64, String)>,
}

impl Axis {
    /// From `first`, at most 0, to a round number not below the values.
    pub(super) fn linear(label: &str, first: f64, values: impl Iterator<Item = f64>) -> Self {
        let highest = values.fold(0.0, f64::max);
        let step = round_step((highest - first).max(f64::MIN_POSITIVE));
        let (from, to) = ((first / step).floor(), (highest / step).ceil().max(1.0));
        let decimals = (0_i32..6).find(|&decimals| step * 10_f64.powi(decimals) > 0.99).unwrap_or_default();
        let decimals = decimals.unsigned_abs() as usize;
        let mut ticks = Vec::new();
        let mut at = from;
        while at <= to {
            ticks.push((at * step, format!("{:.decimals$}", at * step)));
            at += 1.0;
        }
        Self { label: label.to_owned(), scale: Scale::Linear, first: from * step, last: to * step, ticks }
    }

    /// Decades around the values, which must be above 0.
    pub(super) fn logarithmic(label: &str, values: impl Iterator<Item = f64> + Clone) -> Self {
        let lowest = values.clone().fold(f64::MAX, f64::min).max(1.0).log10().floor();
        let highest = values.fold(1.0, f64::max).log10();
        // Half a decade is enough room after the last value.
        let highest = ((highest * 2.0).ceil() / 2.0).max(lowest + 1.0);
        let mut ticks = Vec::new();
        let mut power = lowest;
        while power <= highest {
            let value = 10_f64.powf(power);
            ticks.push((value, thousands(value)));
            power += 1.0;
        }
        let (first, last) = (10_f64.powf(lowest), 10_f64.powf(highest));
        Self { label: label.to_owned(), scale: Scale::Logarithmic, first, last, ticks }
    }

    /// Where a value is: 0 at the start of the axis, 1 at its end.
    pub(super) fn position(&self, value: f64) -> f64 {
        let place = |value: f64| match self.scale {
            Scale::Linear => value,
            Scale::Logarithmic => value.max(f64::MIN_POSITIVE).log10(),
        };
        (place(value) - place(self.first)) / (place(self.last) - place(self.first))
    }

    /// The highest value.
    pub(super) fn last(&self) -> f64 {
        self.last
    }
}

/// A step of 1, 2 or 5 times a power of ten: four to ten of it cover the range.
fn round_step(range: f64) -> f64 {
    let power = 10_f64.powf((range / 10.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| range / (factor * power) <= 8.0);
    step.unwrap_or(10.0) * power
}

/// A number in thousands or millions, as `64 k`.
fn thousands(value: f64) -> String {
    if value >= 1e6 {
        format!("{:.0} M", value / 1e6)
    } else if value >= 1e3 {
        format!("{:.0} k", value / 1e3)
    } else {
        format!("{value:.0}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn ticks_are_round_numbers_that_cover_the_values() {
        let axis = Axis::linear("", 0.0, [12.0, 35.0].into_iter());
        assert_eq!(labels(&axis), ["0", "5", "10", "15", "20", "25", "30", "35"]);
        assert_eq!((axis.position(0.0), axis.position(35.0)), (0.0, 1.0));
        let axis = Axis::linear("", 0.0, [2.27].into_iter());
        assert_eq!(labels(&axis), ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]);
        let axis = Axis::linear("", -100.0, [650.0].into_iter());
        assert_eq!(labels(&axis), ["-100", "0", "100", "200", "300", "400", "500", "600", "700"]);
    }

    #[test]
    fn a_logarithmic_axis_has_a_tick_per_decade() {
        let axis = Axis::logarithmic("", [1000.0, 1_048_576.0].into_iter());
        assert_eq!(labels(&axis), ["1 k", "10 k", "100 k", "1 M"]);
        assert!((axis.position(1000.0)).abs() < 1e-9 && axis.position(1_048_576.0) < 1.0);
        assert!((2.0 * axis.position(10_000.0) - axis.position(100_000.0)).abs() < 1e-9);
    }

    #[test]
    fn an_axis_of_zeros_has_a_range() {
        let axis = Axis::linear("", 0.0, [0.0].into_iter());
        assert!(axis.last() > 0.0 && axis.position(0.0) == 0.0);
    }
}
