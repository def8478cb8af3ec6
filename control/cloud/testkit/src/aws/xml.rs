//! XML of replies.

use crate::request::Reply;

const TYPE: &str = "text/xml;charset=UTF-8";
const NAMESPACE: &str = "http://ec2.amazonaws.com/doc/2016-11-15/";

/// Text in XML.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// An element with text.
pub(super) fn element(name: &str, text: &str) -> String {
    format!("<{name}>{}</{name}>", escape(text))
}

/// A list, whose items are XML.
pub(super) fn set(name: &str, items: impl IntoIterator<Item = String>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| format!("<item>{item}</item>")).collect();
    format!("<{name}>{}</{name}>", items.concat())
}

pub(super) fn reply(action: &str, body: &str) -> Reply {
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<{action}Response xmlns=\"{NAMESPACE}\">\
         <requestId>00000000-0000-4000-8000-000000000000</requestId>{body}</{action}Response>"
    );
    Reply::text(200, TYPE, text)
}

pub(super) fn error(status: u16, code: &str, message: &str) -> Reply {
    let error = format!("<Error>{}{}</Error>", element("Code", code), element("Message", message));
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Response><Errors>{error}</Errors>\
         <RequestID>00000000-0000-4000-8000-000000000000</RequestID></Response>"
    );
    Reply::text(status, TYPE, text)
}

/// An error's reply, for faults.
pub fn error_reply(status: u16, code: &str) -> Reply {
    error(status, code, "A fault of the test.")
}
