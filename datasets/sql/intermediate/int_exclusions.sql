-- int_exclusions: training rows of a kind that no verifier can grade with trust, with the words that say so.
-- Kimi k1.5 drops multiple choice, true/false and proofs, since they verify wrong reasoning; Qwen3 drops
-- questions of several parts and those without a checkable answer. How well the rules do on labelled
-- problems: datasets/exclusions_labelled.jsonl, held by tests/sql/test_exclusions.py.
-- A question that asks to draw, or asks twice, stays when its answer is one number: that can be checked.
-- Programs are checked by their tests, JSON by its schema, reasoning-gym's problems by their scorers: no rule about what
-- cannot be checked holds for them, and of programs none does, since tests are not passed by guessing.
-- (RE2 knows no letters but ASCII ones in \w and \W, so the classes of Unicode are named.)
-- Grain: one row per good training row that a rule met; of several rules the first counts.
--   pool_order, row_number   as in stg_problems
--   rule                     varchar  `multiple choice`, `true or false`, `proof`, `multi-part`, `no checkable answer`
--   evidence                 varchar  what the rule found in the question or in the answer
with counted as (
    select
        *,
        len(regexp_extract_all(
            regexp_replace(answer, '\\(?:begin|end)\s*\{[^}]*\}|\\[A-Za-z]+', ' ', 'g'), '[^\s\p{Z}]*\p{L}{2}[^\s\p{Z}]*'
        )) as answer_words
    from stg_problems
    where benchmark is null and answer_type <> 'code'
),

problems as (
    select
        *,
        answer_words <= 2
        and (answer_words = 0 or regexp_matches(answer, '^[^\p{L}]*\p{N}'))
        and regexp_matches(answer, '\p{N}|π|\\pi')
        and not regexp_matches(answer, '(?i)[,;]\s|\n|[\s\p{Z}](?:and|or)[\s\p{Z}]') as is_one_number
    from counted
),

found as (
    select
        pool_order,
        row_number,
        answer_type,
        nullif(coalesce(
            nullif(regexp_extract(question, '(?s)(?:^|[\s{])\(?A\s?\)}?\s*\S.*?[\s{]\(?B\s?\)}?\s*\S.*?[\s{]\(?C\s?\)'), ''),
            nullif(regexp_extract(question, '(?s)(?:^|\n)\s*A\s?[.:]\s*\S.*?\n\s*B\s?[.:]\s*\S.*?\n\s*C\s?[.:]'), ''),
            nullif(regexp_extract(
                question,
                '(?i)\b(?:which (?:one )?of (?:the following|these)|(?:choose|select|pick|mark|circle) (?:the |all )?(?:(?:correct|best|right) (?:answer|option|choice|alternative|statement|expression|estimate|value|one)s?\b|following|that apply|one of (?:the following|these))|answer choices?:|options?:)'
            ), ''),
            if(
                regexp_full_match(answer, '(?i)\(?[A-E]\)?\.?'),
                nullif(regexp_extract(question, '(?is)(?:^|[\s({])A[).:]\s*\S.*?[\s({]B[).:]'), ''),
                null
            )
        ), '') as "multiple choice",
        nullif(coalesce(
            nullif(regexp_extract(question, '(?i)\b(?:true or false|true/false|yes or no|yes/no|right or wrong|correct or incorrect)\b'), ''),
            nullif(regexp_extract(answer, '(?i)^(?:true|false|yes|no|correct|incorrect)\b[.!]?$'), ''),
            nullif(regexp_extract(answer, '(?i)^(?:yes|no)[,.;:] .*'), '')
        ), '') as "true or false",
        nullif(coalesce(
            nullif(regexp_extract(question, '(?i)(?:^|[.;:!?,$)]\s+|\n\s*|\band (?:then |hence )?|\bthen |\bto |\bplease |\d[.)] )(?:dis)?prove\b[^.?!]{0,60}'), ''),
            nullif(regexp_extract(question, '(?i)(?:^|[.;:!?,$)]\s+|\n\s*|\band |\bthen |\bplease )(?:show|verify|demonstrate|deduce|establish|justify|conclude)\s+(?:that|why|the (?:identity|inequality|equality|claim|statement)|algebraically)\b[^.?!]{0,60}'), ''),
            nullif(regexp_extract(question, '(?i)\b(?:give|write|provide|find|construct|complete) (?:a|an|the|your)(?: \w+){0,2} proof\b'), ''),
            nullif(regexp_extract(answer, '(?i)^(?:proof\b|q\.?e\.?d\b|(?:it is )?proven\b|we (?:prove|show)\b).{0,60}'), '')
        ), '') as "proof",
        nullif(coalesce(
            nullif(regexp_extract(question, '(?s)(?:^|\s)\(a\)\s.*?\s\(b\)\s'), ''),
            nullif(regexp_extract(question, '(?s)(?:^|[.?!:;]\s+|\n\s*)a\)\s.*?\sb\)\s'), ''),
            nullif(regexp_extract(question, '(?s)(?:^|[.?!:;]\s+|\n\s*)a\.\s.*?(?:[.?!:;,]\s+|\n\s*)b\.\s'), ''),
            nullif(regexp_extract(question, '(?s)\(i\).*?\(ii\)'), ''),
            nullif(regexp_extract(question, '(?s)(?:^|[.?!:;]\s+|\n\s*)1[.)]\s+[A-Z].*?(?:[.?!:;,]\s+|\n\s*)2[.)]\s+[A-Z]'), ''),
            if(is_one_number, null, nullif(regexp_extract(question, '(?is)\bpart \(?(?:a|i|1|one)\b.*?\bpart \(?(?:b|ii|2|two)\b'), '')),
            if(is_one_number, null, nullif(regexp_extract(question, '(?i)\?\s+(?:and |also,? |if so,? |in addition,? )?(?:what|how|who|which|when|where|is|are|does|do|can|find|compute|calculate|determine)\b.*[?.]\s*$'), '')),
            nullif(regexp_extract(question, '(?i)[.?]\s+(?:also,? |in addition,? |moreover,? |additionally,? )(?:find|compute|calculate|determine|state|give|what|how)\b.*'), ''),
            nullif(regexp_extract(answer, '(?s)^\(?(?:a|i|1)\).*\(?(?:b|ii|2)\)'), '')
        ), '') as "multi-part",
        nullif(coalesce(
            nullif(regexp_extract(
                question,
                '(?i)(?:^|[.;:!?$]\s+|\n\s*|\band )(?:explain|describe|discuss|outline|summari[sz]e|compare and contrast|interpret|comment on|critique) (?:how|why|what|the|in|a|an|its|each|two|three|whether|on)\b[^.?!]{0,60}'
            ), ''),
            if(is_one_number, null, nullif(regexp_extract(question, '(?i)(?:^|[.;:!?$]\s+|\n\s*)(?:sketch|draw|plot|graph|construct|design|invent|make up) (?:the|a|an|and|two|your)\b[^.?!]{0,60}'), '')),
            nullif(regexp_extract(question, '(?i)(?:^|[.;:!?$]\s+|\n\s*)write (?:a|an|your|the) (?:\w+ ){0,2}(?:story|essay|poem|paragraph|word problem|problem|report|summary|question|program)\b'), ''),
            nullif(regexp_extract(question, '(?i)(?:^|[.;:!?$]\s+|\n\s*)(?:give|find|provide|state|list) (?:an|some|two|three|any) (?:\w+ )?(?:examples?|counterexamples?)\b'), ''),
            nullif(regexp_extract(question, '(?i)(?:^|[.;:!?$]\s+|\n\s*|, )(?:why (?:is|are|does|do|did|was|were|can|must|should)|what do you (?:think|notice)|in your own words)\b[^.?!]{0,60}'), ''),
            nullif(regexp_extract(answer, '(?i)^(?:.*\b)?(?:answers? (?:may|will|can) vary|see (?:the )?(?:solution|figure|explanation|above|graph|diagram|text|proof)|left (?:to|as) .{0,20}(?:reader|exercise)|omitted)\b.*'), ''),
            nullif(regexp_extract(answer, '(?i)^(?:n/?a|none|null|unknown|nan|tbd|[\s\p{Z}\p{C}\p{Pd}\p{Pc}\p{Ps}\p{Pe}\p{Pi}\p{Pf}.,:;?!…''"`$\\]*)$'), ''),
            if(answer_words >= 20, answer, null)
        ), '') as "no checkable answer"
    from problems
),

hits as (
    unpivot found
    on "multiple choice", "true or false", "proof", "multi-part", "no checkable answer"
    into name rule value evidence
),

final as (
    select hits.pool_order, hits.row_number, hits.rule, substr(hits.evidence, 1, 200) as evidence
    from hits
    inner join excluded_kinds using (rule)
    where
        hits.answer_type not in ('json_schema', 'reasoning_gym')
        or hits.rule in ('multiple choice', 'true or false')
    qualify row_number() over (partition by hits.pool_order, hits.row_number order by excluded_kinds.place) = 1
)

select * from final
