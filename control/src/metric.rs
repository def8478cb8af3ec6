//! Metric definitions: name, type, labels and help in one place, from which exposition and reference follow.

/// Metric type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A counter; its name ends in `_total`.
    Counter,
    Gauge,
    /// A gauge with values in milliseconds, exposed in seconds.
    Milliseconds,
    /// Always 1, with the information in labels; its name ends in `_info`.
    Info,
}

impl Kind {
    /// The suffix of names in the text format.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Gauge | Self::Milliseconds => "",
            Self::Info => "_info",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Label {
    pub name: &'static str,
    pub values: LabelValues,
}

/// The values of a label.
#[derive(Clone, Copy, Debug)]
pub enum LabelValues {
    /// The names of an enum.
    Names(fn() -> Vec<&'static str>),
    /// These.
    OneOf(&'static [&'static str]),
    /// Any; described for the reference.
    Any(&'static str),
}

impl Label {
    /// A label with the names of an enum.
    pub(crate) const fn names(name: &'static str, values: fn() -> Vec<&'static str>) -> Self {
        Self { name, values: LabelValues::Names(values) }
    }

    /// A label with one of these values.
    pub(crate) const fn one_of(name: &'static str, values: &'static [&'static str]) -> Self {
        Self { name, values: LabelValues::OneOf(values) }
    }

    /// A label with any value.
    pub(crate) const fn any(name: &'static str, description: &'static str) -> Self {
        Self { name, values: LabelValues::Any(description) }
    }

    /// Whether a value is one of its values.
    fn allows(&self, value: &str) -> bool {
        match self.values {
            LabelValues::Names(values) => values().contains(&value),
            LabelValues::OneOf(values) => values.contains(&value),
            LabelValues::Any(_) => true,
        }
    }
}

/// The definition of a metric.
#[derive(Debug)]
pub struct Metric {
    /// Name without `vipgate_` and without the suffix of its type.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Its labels, in order.
    pub labels: &'static [Label],
    /// Help: one sentence without the period.
    pub help: &'static str,
}

impl Metric {
    /// The metric with its samples.
    pub fn family(&'static self, values: Vec<(Labels, u64)>) -> Family {
        debug_assert!(values.iter().all(|(labels, _)| self.has_labels(labels)), "{}: {values:?}", self.name);
        Family { metric: self, values }
    }

    /// A metric without labels.
    pub(crate) fn single(&'static self, value: u64) -> Family {
        self.family(vec![(Labels::new(), value)])
    }

    /// A metric with one label.
    pub(crate) fn by_label<T: Into<String>>(&'static self, values: impl IntoIterator<Item = (T, u64)>) -> Family {
        let label = self.labels[0].name;
        self.family(values.into_iter().map(|(text, value)| (vec![(label, text.into())], value)).collect())
    }

    /// Name in the text format: `vipgate_drops_total`.
    pub(crate) fn full_name(&self) -> String {
        format!("vipgate_{}{}", self.name, self.kind.suffix())
    }

    fn has_labels(&self, labels: &Labels) -> bool {
        labels.len() == self.labels.len()
            && labels.iter().zip(self.labels).all(|((name, value), label)| *name == label.name && label.allows(value))
    }
}

/// Label names and values.
pub type Labels = Vec<(&'static str, String)>;

/// A metric family: all samples of one metric.
#[derive(Clone, Debug)]
pub struct Family {
    pub metric: &'static Metric,
    /// Samples: labels and value.
    pub values: Vec<(Labels, u64)>,
}

/// Defines metrics, and a list of them in this order.
macro_rules! metrics {
    (
        $(#[$doc:meta])* $vis:vis $all:ident:
        $($metric:ident = $kind:ident($name:literal, [$($label:expr),*]): $help:literal;)+
    ) => {
        $(
            #[doc = $help]
            $vis static $metric: $crate::metric::Metric = $crate::metric::Metric {
                name: $name,
                kind: $crate::metric::Kind::$kind,
                labels: &[$($label),*],
                help: $help,
            };
        )+
        $(#[$doc])*
        $vis static $all: &[&$crate::metric::Metric] = &[$(&$metric),+];
    };
}

pub(crate) use metrics;
