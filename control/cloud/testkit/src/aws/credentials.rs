//! Keys: issued by STS and by the metadata server, and checked in requests.

use super::xml::element;
use super::{Parameters, Refusal};
use crate::request::{RecordedRequest, Reply};

/// Access key id that is always valid.
pub const ACCESS_KEY: &str = "AKIDFIXED";
/// Authorization token of the agent of containers.
pub const AGENT_TOKEN: &str = "agent-token";
/// Token of the metadata server.
const METADATA_TOKEN: &str = "metadata-token";
/// Name of the instance's role.
const ROLE: &str = "gateway-role";

/// The keys that were issued, and from which number on they are valid.
#[derive(Default)]
pub(super) struct Issued {
    count: u32,
    valid_from: u32,
}

impl Issued {
    pub(super) fn expire(&mut self) {
        self.valid_from = self.count + 1;
    }

    fn issue(&mut self) -> String {
        self.count += 1;
        format!("ASIA{:04}", self.count)
    }

    /// Whether a request is signed with a valid key for EC2. The signature itself is moto's to verify.
    pub(super) fn check(&self, request: &RecordedRequest) -> Result<(), Refusal> {
        let refuse = |code, message: &str| Refusal { status: 401, code, message: message.to_owned() };
        let Some(header) = request.header("authorization") else {
            return Err(refuse("MissingAuthenticationToken", "Request is missing Authentication Token"));
        };
        let credential = header.strip_prefix("AWS4-HMAC-SHA256 Credential=").unwrap_or_default();
        let mut scope = credential.split(',').next().unwrap_or_default().split('/');
        let (key, _date, _region, service, end) =
            (scope.next(), scope.next(), scope.next(), scope.next(), scope.next());
        let has_parts = header.contains("SignedHeaders=") && header.contains("Signature=");
        if (service, end) != (Some("ec2"), Some("aws4_request")) || !has_parts {
            return Err(refuse("IncompleteSignature", "The request signature does not conform to AWS standards"));
        }
        let number = key.and_then(|key| key.strip_prefix("ASIA")?.parse::<u32>().ok());
        match (key, number) {
            (Some(ACCESS_KEY), _) => Ok(()),
            (_, Some(number)) if request.header("x-amz-security-token").is_none() || number > self.count => {
                Err(refuse("InvalidClientTokenId", "The security token included in the request is invalid"))
            }
            (_, Some(number)) if number < self.valid_from => {
                Err(Refusal { status: 400, code: "ExpiredToken", message: "The security token has expired".to_owned() })
            }
            (_, Some(_)) => Ok(()),
            _ => Err(refuse("AuthFailure", "AWS was not able to validate the provided access credentials")),
        }
    }

    pub(super) fn assume_role(&mut self, parameters: &Parameters) -> Reply {
        if parameters.get("WebIdentityToken").is_none_or(|token| token != "good-token") {
            let error =
                format!("<Error>{}{}</Error>", element("Code", "InvalidIdentityToken"), element("Message", "bad"));
            return Reply::text(400, "text/xml", format!("<ErrorResponse>{error}</ErrorResponse>"));
        }
        let credentials = [
            element("AccessKeyId", &self.issue()),
            element("SecretAccessKey", "secret"),
            element("SessionToken", "session"),
            element("Expiration", "2999-01-01T00:00:00Z"),
        ]
        .concat();
        let result = format!(
            "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\
             <AssumeRoleWithWebIdentityResult><Credentials>{credentials}</Credentials>\
             </AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        );
        Reply::text(200, "text/xml", result)
    }

    pub(super) fn metadata(&mut self, request: &RecordedRequest) -> Reply {
        let text = |text: &str| Reply::text(200, "text/plain", text.to_owned());
        if request.method == "PUT" && request.path == "/latest/api/token" {
            let has_ttl = request.header("x-aws-ec2-metadata-token-ttl-seconds").is_some();
            return if has_ttl { text(METADATA_TOKEN) } else { Reply::text(400, "text/plain", String::new()) };
        }
        if request.header("x-aws-ec2-metadata-token") != Some(METADATA_TOKEN) {
            return Reply::text(401, "text/plain", "Unauthorized".to_owned());
        }
        let roles = "/latest/meta-data/iam/security-credentials/";
        match request.path.strip_prefix(roles) {
            Some("") => text(ROLE),
            Some(ROLE) => self.keys(),
            _ => Reply::text(404, "text/plain", String::new()),
        }
    }
    /// The agent of EKS Pod Identity, or ECS.
    pub(super) fn of_container(&mut self, request: &RecordedRequest) -> Reply {
        match request.header("authorization") {
            Some(AGENT_TOKEN) => self.keys(),
            _ => Reply::text(401, "text/plain", "Unauthorized".to_owned()),
        }
    }

    fn keys(&mut self) -> Reply {
        let keys = serde_json::json!({
            "Code": "Success",
            "AccessKeyId": self.issue(),
            "SecretAccessKey": "secret",
            "Token": "session",
            "Expiration": "2999-01-01T00:00:00Z",
        });
        Reply::json(200, &keys)
    }
}
