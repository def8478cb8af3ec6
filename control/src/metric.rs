//! Metric families: what the parts of a process report, and `metrics/` exposes.

/// Metric type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A counter; its name ends in `_total`.
    Counter,
    /// A gauge.
    Gauge,
    /// A gauge with values in milliseconds, exposed in seconds.
    Milliseconds,
    /// Always 1, with the information in labels; its name ends in `_info`.
    Info,
}

/// Label names and values.
pub(crate) type Labels = Vec<(&'static str, String)>;

/// A metric family: all samples of one metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Family {
    /// Name without the suffix of its type.
    pub(crate) name: String,
    /// Help: one sentence without the period.
    pub(crate) help: &'static str,
    pub(crate) kind: Kind,
    pub(crate) values: Vec<(Labels, u64)>,
}

/// Builds a family; adds the prefix `vipgate_` to the name.
pub(crate) fn family(name: &str, help: &'static str, kind: Kind, values: Vec<(Labels, u64)>) -> Family {
    Family { name: format!("vipgate_{name}"), help, kind, values }
}
