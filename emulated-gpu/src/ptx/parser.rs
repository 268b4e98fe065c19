//! Parses operands and the declarations of a module.

use crate::DecodeError;

use super::syntax::{Function, Operand, Text, VariableText};
use super::token::{Token, tokens};
use super::types::Type;

pub(super) struct Parser<'a> {
    tokens: Vec<Token<'a>>,
    pub at: usize,
}

pub(super) type Parsed<T> = Result<T, DecodeError>;

/// Returns the bits of a number: an integer, `0f` with the bits of an f32, or `0d` with the bits of an f64.
fn number(text: &str) -> Option<u64> {
    let lower = text.to_ascii_lowercase();
    if let Some(digits) = lower.strip_prefix("0f").or(lower.strip_prefix("0d")).or(lower.strip_prefix("0x")) {
        return u64::from_str_radix(digits.trim_end_matches('u'), 16).ok();
    }
    if let Some(digits) = lower.strip_prefix("0b") {
        return u64::from_str_radix(digits, 2).ok();
    }
    let digits = lower.trim_end_matches('u');
    if digits.len() > 1 && digits.starts_with('0') {
        return u64::from_str_radix(digits, 8).ok();
    }
    digits.parse().ok()
}

impl<'a> Parser<'a> {
    pub fn peek(&self) -> &'a str {
        self.tokens.get(self.at).map_or("", |t| t.text)
    }

    pub fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |t| t.line)
    }

    pub fn fail<T>(&self, what: String) -> Parsed<T> {
        Err(DecodeError { line: self.line(), what })
    }

    pub fn next(&mut self) -> Parsed<&'a str> {
        let Some(token) = self.tokens.get(self.at) else {
            return self.fail("the text ends too early".to_owned());
        };
        self.at += 1;
        Ok(token.text)
    }

    pub fn eat(&mut self, text: &str) -> bool {
        let eaten = self.peek() == text;
        self.at += usize::from(eaten);
        eaten
    }

    pub fn need(&mut self, text: &str) -> Parsed<()> {
        if self.eat(text) { Ok(()) } else { self.fail(format!("expected `{text}`, found `{}`", self.peek())) }
    }

    pub fn integer(&mut self) -> Parsed<i64> {
        let negative = self.eat("-");
        let text = self.next()?;
        match number(text) {
            Some(value) if negative => Ok((value as i64).wrapping_neg()),
            Some(value) => Ok(value as i64),
            None => self.fail(format!("`{text}` is no number")),
        }
    }

    /// Skips the remaining tokens on the last token's line.
    pub fn skip_line(&mut self) {
        let line = self.tokens.get(self.at.saturating_sub(1)).map_or(0, |t| t.line);
        while self.tokens.get(self.at).is_some_and(|t| t.line == line) {
            self.at += 1;
        }
    }

    /// Skips all tokens up to the closing brace of the innermost open block, and the brace.
    pub fn skip_braces(&mut self) -> Parsed<()> {
        let mut depth = 1;
        while depth > 0 {
            match self.next()? {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
        }
        Ok(())
    }

    pub fn operands(&mut self, end: &str) -> Parsed<Vec<Operand<'a>>> {
        let mut found = Vec::new();
        while !self.eat(end) {
            found.push(self.operand()?);
            if !self.eat(",") && self.peek() != end {
                return self.fail(format!("expected `,` or `{end}`, found `{}`", self.peek()));
            }
        }
        Ok(found)
    }

    fn operand(&mut self) -> Parsed<Operand<'a>> {
        match self.peek() {
            "{" => {
                self.at += 1;
                Ok(Operand::List(self.operands("}")?))
            }
            "(" => {
                self.at += 1;
                Ok(Operand::Group(self.operands(")")?))
            }
            "[" => {
                self.at += 1;
                self.address()
            }
            "!" => {
                self.at += 1;
                Ok(Operand::Not(self.next()?))
            }
            "-" => Ok(Operand::Number(self.integer()? as u64)),
            text if text.starts_with(|c: char| c.is_ascii_digit()) => {
                Ok(Operand::Number(self.integer()? as u64))
            }
            text if text.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '%' | '_' | '$')) => {
                self.at += 1;
                if self.eat("|") { Ok(Operand::Pair(text, self.next()?)) } else { Ok(Operand::Name(text)) }
            }
            text => self.fail(format!("`{text}` is no operand")),
        }
    }

    fn address(&mut self) -> Parsed<Operand<'a>> {
        let base = self.next()?;
        let plus = self.eat("+");
        let offset = if plus || self.peek() == "-" { self.integer()? } else { 0 };
        if self.eat("]") {
            return Ok(Operand::Address { base, offset });
        }
        let mut depth = 1;
        while depth > 0 {
            match self.next()? {
                "[" => depth += 1,
                "]" => depth -= 1,
                ";" => return self.fail("an address does not end".to_owned()),
                _ => {}
            }
        }
        Ok(Operand::Other)
    }

    /// Parses a variable's declaration after its state space, such as `.align 8 .b8 name[16] = {…}`.
    pub fn variable(&mut self, space: &'a str) -> Parsed<VariableText<'a>> {
        let (mut align, mut count, mut ty) = (1, 1, None);
        while self.peek().starts_with('.') {
            match self.next()? {
                ".align" => align = self.integer()? as u64,
                ".v2" => count = 2,
                ".v4" => count = 4,
                ".ptr" | ".global" | ".const" | ".shared" | ".local" => {}
                ".attribute" => while self.next()? != ")" {},
                text => match Type::parse(text) {
                    Some(found) => ty = Some(found),
                    None => return self.fail(format!("`{text}` is no type")),
                },
            }
        }
        let Some(ty) = ty else { return self.fail("a variable has no type".to_owned()) };
        let name = self.next()?;
        let element = u64::from(ty.bytes()) * count;
        let (mut bytes, mut array) = (element, false);
        while self.eat("[") {
            array = true;
            bytes *= if self.peek() == "]" { 0 } else { self.integer()? as u64 };
            self.need("]")?;
        }
        let mut initial = Vec::new();
        if self.eat("=") {
            let values = if self.eat("{") { self.operands("}")? } else { vec![self.operand()?] };
            self.flatten(&values, ty.bytes() as usize, &mut initial)?;
            if bytes == 0 {
                bytes = initial.len() as u64;
            }
        }
        // In a parameter, `.ptr .align` is the alignment of the memory that the pointer refers to, not of the
        // parameter.
        let align = if space == ".param" && !array { element } else { align.max(element) };
        Ok(VariableText { name, space, align, bytes, initial })
    }

    fn flatten(&self, values: &[Operand<'_>], element: usize, into: &mut Vec<u8>) -> Parsed<()> {
        for value in values {
            match value {
                Operand::Number(bits) => into.extend_from_slice(&bits.to_le_bytes()[..element]),
                Operand::List(inner) => self.flatten(inner, element, into)?,
                other => return self.fail(format!("an initial value of {other:?} is not supported")),
            }
        }
        Ok(())
    }

    fn parameters(&mut self) -> Parsed<Vec<VariableText<'a>>> {
        let mut found = Vec::new();
        if !self.eat("(") {
            return Ok(found);
        }
        while !self.eat(")") {
            let space = self.next()?;
            if space != ".param" {
                return self.fail(format!("a parameter in the space {space} is not supported"));
            }
            found.push(self.variable(space)?);
            self.eat(",");
        }
        Ok(found)
    }

    fn function(&mut self, is_kernel: bool, files: &mut Vec<(u32, String)>) -> Parsed<Function<'a>> {
        let mut function = Function { is_kernel, ..Function::default() };
        if !is_kernel {
            function.returns = self.parameters()?;
        }
        function.name = self.next()?;
        function.parameters = self.parameters()?;
        while !matches!(self.peek(), "{" | ";") {
            if matches!(self.next()?, ".maxntid" | ".reqntid") {
                let mut threads = self.integer()?;
                while self.eat(",") {
                    threads *= self.integer()?;
                }
                function.max_threads = Some(threads as u32);
            }
        }
        if self.next()? == "{" {
            let start = self.at;
            match self.body(files) {
                Ok(body) => function.body = Some(body),
                Err(error) => {
                    function.body = Some(Vec::new());
                    function.error = Some(error);
                    self.at = start;
                    self.skip_braces()?;
                }
            }
        }
        Ok(function)
    }

    pub fn file(&mut self, files: &mut Vec<(u32, String)>) -> Parsed<()> {
        let index = self.integer()? as u32;
        let name = self.next()?.trim_matches('"').to_owned();
        files.push((index, name));
        self.skip_line();
        Ok(())
    }
}

/// Parses a module. An error in a function's body is stored in that function.
///
/// # Errors
///
/// If the text outside of the bodies is not PTX.
pub fn parse(text: &str) -> Parsed<Text<'_>> {
    let mut parser = Parser { tokens: tokens(text)?, at: 0 };
    let mut module = Text::default();
    while parser.at < parser.tokens.len() {
        match parser.next()? {
            ".version" | ".target" | ".address_size" | ".pragma" | ".alias" => parser.skip_line(),
            ".file" => parser.file(&mut module.files)?,
            ".section" => {
                parser.next()?;
                parser.need("{")?;
                parser.skip_braces()?;
            }
            ".visible" | ".weak" | ".extern" | ".common" | ".noreturn" => {}
            space @ (".global" | ".const" | ".shared") => {
                let variable = parser.variable(space)?;
                module.variables.push(variable);
                parser.need(";")?;
            }
            ".entry" => module.functions.push(parser.function(true, &mut module.files)?),
            ".func" => module.functions.push(parser.function(false, &mut module.files)?),
            ";" => {}
            text => {
                parser.at -= 1;
                return parser.fail(format!("`{text}` is no directive that is known"));
            }
        }
    }
    Ok(module)
}
