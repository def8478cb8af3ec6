//! Faults that a fake injects.

use std::time::Duration;

use crate::request::{RecordedRequest, Reply};

/// What happens to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This reply; the request isn't carried out.
    Reply(Reply),
    /// It is carried out, but the connection breaks before the answer.
    LostReply,
    /// The connection breaks before it is carried out.
    LostRequest,
    /// It is carried out, but this is the reply: an error of an intermediary.
    Masked(Reply),
    /// It is carried out after this time.
    Delay(Duration),
}

/// A fault for the next requests that it is for.
struct Planned {
    is_for: Box<dyn Fn(&RecordedRequest) -> bool + Send>,
    fault: Fault,
    left: usize,
}

/// Faults in the order in which they were planned; each request has at most one.
#[derive(Default)]
pub struct Faults {
    planned: Vec<Planned>,
}

impl Faults {
    /// Plans a fault for the next `count` requests that it is for.
    pub fn plan(&mut self, count: usize, fault: Fault, is_for: impl Fn(&RecordedRequest) -> bool + Send + 'static) {
        self.planned.push(Planned { is_for: Box::new(is_for), fault, left: count });
    }

    /// Takes the fault of a request.
    pub(crate) fn take(&mut self, request: &RecordedRequest) -> Option<Fault> {
        let at = self.planned.iter().position(|planned| (planned.is_for)(request))?;
        let planned = &mut self.planned[at];
        planned.left -= 1;
        let fault = planned.fault.clone();
        if planned.left == 0 {
            self.planned.remove(at);
        }
        Some(fault)
    }
}
